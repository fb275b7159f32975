"""Write requirements.lock from what pip resolves, a SHA-256 a package:

pip install --dry-run --ignore-installed --quiet --report report.json -c constraints.txt '.[dev]'
python tests/supply/lock.py report.json > requirements.lock
"""

import json
import sys
from pathlib import Path

HEAD = """\
# Files for CPython 3.11 on x86-64 Linux, one SHA-256 each (tests/supply/lock.py says how this is
# written). torch is not among them: its CPU and CUDA builds share the version and no hash.
#   pip install --require-hashes --no-deps -r requirements.lock
#   pip install -c constraints.txt torch && pip install --no-deps -e .
"""


def lock(report: dict) -> str:
    lines = []
    for item in report["install"]:
        name = item["metadata"]["name"]
        # The suite itself has no archive.
        if "archive_info" in item["download_info"] and name != "torch":
            sha256 = item["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{name}=={item['metadata']['version']} --hash=sha256:{sha256}")
    return HEAD + "\n".join(sorted(lines, key=str.lower)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(lock(json.loads(Path(sys.argv[1]).read_text("utf-8"))))
