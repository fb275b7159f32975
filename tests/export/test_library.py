"""What transformers' own tools do with the model: save, load, configure, train, score."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import FAMILIES, drawn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import mol
from mol.export import MoLConfig, MoLForCausalLM
from mol.model.config import ModelConfig, SplitLayer

HYBRID = "split-rms-top-routed-linear-shared-deltanet"
IDS = torch.arange(2, 42).view(4, 10)


@pytest.fixture
def hybrid():
    return made(HYBRID)


def made(family: str) -> MoLForCausalLM:
    model = MoLForCausalLM(MoLConfig(**FAMILIES[family].model_dump(mode="json"))).eval()
    model.model.load_state_dict(drawn(FAMILIES[family]).state_dict())
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_bit_by_bit(family, tmp_path):
    model = made(family)
    model.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is MoLForCausalLM is mol.MoLForCausalLM and not loaded.training
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = loaded.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    assert loaded.config.architecture() == FAMILIES[family]
    assert type(AutoConfig.from_pretrained(tmp_path)) is mol.MoLConfig
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_importing_the_package_stays_cheap():
    code = "import sys, mol; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_embedding_is_stored_once_and_grows_with_the_vocabulary(hybrid, tmp_path):
    assert hybrid.get_output_embeddings() is None
    hybrid.resize_token_embeddings(310)
    assert hybrid(IDS).logits.shape[-1] == hybrid.config.vocab_size == 310
    hybrid.save_pretrained(tmp_path)
    shapes = [w.shape for w in load_file(tmp_path / "model.safetensors").values()]
    assert sum(310 in shape for shape in shapes) == 1
    loaded = MoLForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, hybrid(IDS).logits)


def test_weights_are_drawn_as_training_draws_them():
    torch.manual_seed(3)
    ours = MoLForCausalLM(MoLConfig(**FAMILIES[HYBRID].model_dump(mode="json")))
    torch.manual_seed(3)
    plain = mol.model.transformer.LanguageModel(FAMILIES[HYBRID])
    state = plain.state_dict()
    assert all(torch.equal(w, state[name]) for name, w in ours.model.state_dict().items())


@pytest.mark.parametrize("change", ["missing", "superfluous", "shape", "cut"])
def test_weights_that_do_not_fit_are_refused(hybrid, tmp_path, change):
    hybrid.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    if change == "missing":
        del weights["model.norm.weight"]
    elif change == "superfluous":
        weights["model.more.weight"] = torch.ones(2)
    elif change == "shape":
        weights["model.norm.weight"] = torch.ones(2)
    save_file(weights, path, metadata={"format": "pt"})
    if change == "cut":
        path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(Exception, match="norm.weight|more.weight|mismatched|header|incomplete"):
        MoLForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loaded_in_another_precision_on_a_named_device(hybrid, tmp_path, dtype):
    hybrid.save_pretrained(tmp_path)
    loaded = MoLForCausalLM.from_pretrained(tmp_path, dtype=dtype, device_map="cpu")
    assert loaded.dtype == dtype and loaded.device.type == "cpu"
    with torch.no_grad():
        close = (loaded(IDS).logits.float() - hybrid(IDS).logits).abs().mean()
        assert close < 0.1 * hybrid(IDS).logits.std()
    text = loaded.generate(IDS, max_new_tokens=5, do_sample=False)
    assert text.shape == (4, 15)


def test_a_configuration_holds_the_architecture_and_checks_it():
    layer = SplitLayer(d_thin=16, n_heads=2, n_blocks=5, n_shared=1, top_k=2, d_ff=32)
    sizes = {"vocab_size": 300, "d_model": 32, "n_layers": 2}
    config = MoLConfig(**sizes, layer=layer)
    assert config.architecture() == ModelConfig(**sizes, layer=layer)
    assert MoLConfig.from_dict(json.loads(config.to_json_string())).architecture() == (
        config.architecture()
    )
    assert (config.hidden_size, config.num_hidden_layers) == (32, 2)
    for change, message in (
        ({"n_layer": 2}, "'n_layer'"),
        ({"d_model": "wide"}, "d_model"),
        ({"layer": layer.model_dump() | {"top_k": 9}}, "top_k = 9"),
        ({"layer": layer.model_dump() | {"heads": 9}}, "heads"),
        ({"layer": {"kind": "mamba"}}, "mamba"),
        ({"tie_word_embeddings": False}, "tied"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            MoLConfig(**{**sizes, "layer": layer, **change})
        assert "\n" not in str(caught.value)


def test_recomputed_activations_give_the_same_gradients(hybrid):
    hybrid.train()

    def gradients():
        hybrid.zero_grad()
        hybrid(IDS, labels=IDS).loss.backward()
        return [weight.grad.clone() for weight in hybrid.parameters()]

    kept = gradients()
    hybrid.activation_checkpointing_enable()
    assert hybrid.is_activation_checkpointing
    calls = []
    handle = hybrid.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    recomputed = gradients()
    handle.remove()
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_training_follows_inference(family):
    """What is kept between calls under inference mode must not enter a gradient."""
    model = made(family)
    with torch.inference_mode():
        model(IDS)
        model.generate(IDS, max_new_tokens=2, do_sample=False)
    model(IDS, labels=IDS).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_the_trainer_takes_a_step(hybrid, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    before = {name: weight.detach().clone() for name, weight in hybrid.named_parameters()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, use_cpu=True,
        report_to=[], learning_rate=0.01, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(model=hybrid, args=arguments, train_dataset=rows, eval_dataset=rows)
    with torch.no_grad():
        wanted = hybrid(IDS, labels=IDS).loss.item()
    result = trainer.train()
    assert result.training_loss == pytest.approx(wanted, rel=1e-5)
    assert all(not torch.equal(w, before[name]) for name, w in hybrid.named_parameters())
    assert trainer.evaluate()["eval_loss"] < wanted
    saved = MoLForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    with torch.no_grad():
        assert torch.equal(saved(IDS).logits, hybrid(IDS).logits)
