"""What is installed is what is pinned, and its licenses are listed."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

from licenses import HEAD, ROOT, license_of, page, pins

LISTED = (ROOT / "docs/licenses.md").read_text("utf-8")


def test_installed_packages_fit_each_other():
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def installed():
    for name in pins():
        try:
            yield name, distribution(name)
        except PackageNotFoundError:
            continue  # of the extra `gpu`


def test_installed_packages_are_the_pinned_ones():
    found = {name: package.version.split("+")[0] for name, package in installed()}
    assert len(found) > 100
    assert {name: version for name, version in pins().items() if name in found} == found


def test_every_requirement_of_an_installed_package_is_pinned():
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in pins()}
    wanted = set()
    for _, package in installed():
        for line in package.requires or ():
            requirement, _, marker = line.partition(";")
            name = re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()
            if not marker:
                wanted.add(name)
    assert len(wanted) > 50
    # pip brings setuptools into no environment; torch asks for it without using it at run time.
    assert wanted - pinned - {"setuptools", "pip"} == set()


def test_the_license_page_lists_every_pinned_package_as_installed():
    rows = dict(re.findall(r"^\| (\S+) \| \S+ \| (.+) \|$", LISTED, re.MULTILINE))
    rows.pop("package")
    assert LISTED.startswith(HEAD) and rows.keys() == pins().keys()
    for name, package in installed():
        if rows[name] != "not installed here":
            assert rows[name] == license_of(package), f"{name}: write docs/licenses.md again"
    assert page().startswith(HEAD)


def test_the_lock_has_a_hash_for_every_pinned_version():
    text = (ROOT / "requirements.lock").read_text("utf-8")
    locked = re.findall(r"^(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert len(locked) == sum(not line.startswith("#") for line in text.splitlines())
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in locked}
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins().items()}
    versions.pop("setuptools")  # of torch, which builds nothing here
    assert versions.items() <= pinned.items()
    installed_names = {re.sub(r"[-_.]+", "-", name).lower() for name, _ in installed()}
    assert installed_names - versions.keys() == {"torch"}
