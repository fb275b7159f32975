"""The words under and above our panels: scale, hardware, source, and what is missing."""

from mol.report.source import Row

MEANING = {
    "smoke": "smoke scale: small widths, few steps, not a reproduction",
    "proxy": "proxy scale: exact architectures, a fraction of the steps, not a reproduction",
    "paper": "paper scale",
}
HEADING = {
    "smoke": "Ours, smoke scale: not a reproduction",
    "proxy": "Ours, proxy scale: not a reproduction",
    "paper": "Ours, paper scale",
}


def hardware_of(run: Row) -> str:
    """`4 x NVIDIA H200`, or `AMD EPYC 9654, 2 threads` for a CPU."""
    if run["device"] == "cuda":
        return f"{run['hardware_count']} x {run['hardware']}"
    threads = run["threads"]
    return f"{run['hardware']}, {threads} thread{'s' if threads != 1 else ''}"


def caption(scale: str, runs: list[Row], missing: list[str], more: list[str]) -> list[str]:
    """Paragraphs of a figure's caption."""
    if runs:
        hardware = "; ".join(sorted({hardware_of(run) for run in runs}))
        count = f"{len(runs)} run record{'s' if len(runs) != 1 else ''}"
        lines = [f"Ours: {MEANING[scale]}. Hardware: {hardware}. Source: {count}."]
        texts = sorted({str(run["data"].get("source", "")) for run in runs} - {""})
        lines += [f"Text: {'; '.join(texts)}."] if texts else []
    else:
        lines = [f"Ours: no run record at {scale} scale."]
    if missing and runs:
        lines.append(f"Missing: {', '.join(missing)}.")
    return lines + more
