"""An export folder: configuration, weights, tokenizer, card and the model's own source files."""

import json
import os
from pathlib import Path

from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast

from mol.base import UserError, read_json, scratch, sha256_file, write_atomic
from mol.data.meta import TOKENIZER, CorpusMeta
from mol.data.tokenizers import PAD
from mol.export.bundle import ENTRY, flat_name, flat_sources
from mol.export.card import card
from mol.export.checkpoint import Checkpoint
from mol.export.configuration_mol import MoLConfig
from mol.export.modeling_mol import MoLForCausalLM
from mol.train.checkpoint import WEIGHTS, load_weights

INDEX = "export.json"


def check_target(folder: Path) -> None:
    """Raises UserError unless `folder` is absent, empty, or an earlier export as it was written."""
    if not folder.exists():
        if folder.is_symlink():
            raise UserError(f"{folder}: a link to nothing; give another folder")
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: a file; give a folder")
    found = sorted(path.name for path in folder.iterdir())
    try:
        files = read_json(folder / INDEX)["files"]
        ours = [INDEX, *(n for n in found if n in files and sha256_file(folder / n) == files[n])]
    except (UserError, KeyError, TypeError):
        ours = []
    if foreign := [name for name in found if name not in ours]:
        raise UserError(
            f"{folder}: holds {foreign[0]}, which no export wrote or which was changed since; "
            "give a new folder"
        )


def hf_tokenizer(corpus: Path, meta: CorpusMeta) -> PreTrainedTokenizerFast:
    """The run's tokenizer as transformers': text never gives special tokens, as in training, and
    batches are padded on the left. GPT-2's has no padding token; end-of-text stands in for it."""
    tokenizer = Tokenizer.from_file(str(corpus / TOKENIZER))
    eos = tokenizer.id_to_token(meta.eos_id)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        pad_token=eos if tokenizer.token_to_id(PAD) is None else PAD,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def load_model(checkpoint: Checkpoint, pad_id: int) -> MoLForCausalLM:
    """The checkpoint's weights in a transformers model. Raises UserError where they are broken or
    do not fit."""
    meta = checkpoint.meta
    config = MoLConfig(
        **checkpoint.model.model_dump(mode="json"), eos_token_id=meta.eos_id, pad_token_id=pad_id
    )
    config.auto_map = {
        "AutoConfig": f"{flat_name(ENTRY)}.MoLConfig",
        "AutoModelForCausalLM": f"{flat_name(ENTRY)}.MoLForCausalLM",
    }
    model = MoLForCausalLM(config)
    load_weights(checkpoint.folder, model.model, meta.tokenizer_sha256)
    for name, weight in model.model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(
                f"{checkpoint.folder / WEIGHTS}: {name} holds NaN or infinity; train the run anew"
            )
    model.generation_config = GenerationConfig(eos_token_id=meta.eos_id, pad_token_id=pad_id)
    return model


def write_export(checkpoint: Checkpoint, folder: Path) -> dict:
    """Write the export, whole or not at all, in the place of an earlier one; returns its index.

    Raises UserError when `folder` holds anything else or the checkpoint is broken.
    """
    check_target(folder)
    tokenizer = hf_tokenizer(checkpoint.corpus, checkpoint.meta)
    model = load_model(checkpoint, tokenizer.pad_token_id)
    parameters = model.num_parameters()
    with scratch(folder) as part:
        new = part / "new"
        tokenizer.save_pretrained(new)
        (new / "README.md").write_text(card(checkpoint, parameters), "utf-8")
        for name, source in flat_sources().items():
            (new / name).write_text(source, "utf-8")
        try:
            model.save_pretrained(new)
        except SafetensorError as error:  # a full disk
            raise OSError(str(error)) from None
        for path in new.iterdir():
            path.chmod(0o644)  # weights come as their writer's alone
        index = {
            "run_id": checkpoint.run_id,
            "parameters": parameters,
            "trained_weights_sha256": sha256_file(checkpoint.folder / WEIGHTS),
            "files": {path.name: sha256_file(path) for path in sorted(new.iterdir())},
        }
        write_atomic(new / INDEX, json.dumps(index, indent=1) + "\n")
        if folder.exists():
            os.replace(folder, part / "old")
        os.replace(new, folder)
    return index
