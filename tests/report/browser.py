"""A headless Chromium for tests, driven through chromedriver's HTTP protocol alone."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def missing() -> str | None:
    """Why no browser can be started, or None."""
    absent = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    return f"no {' and no '.join(absent)} on the path" if absent else None


class Browser:
    """One page at a time. Use as a context manager."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        log = Path(self._folder.name, "driver.log")
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0", f"--log-path={log}"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        words = "started successfully on port "
        line = next(line for line in self._driver.stdout if words in line)
        self._url = f"http://127.0.0.1:{line.split(words)[1].strip().rstrip('.')}"
        options = {
            "binary": shutil.which("chromium"),
            "args": [*FLAGS, f"--user-data-dir={self._folder.name}/profile"],
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._url += f"/session/{made['sessionId']}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self._call("DELETE", "", None)
        finally:
            self._driver.terminate()
            self._driver.wait(10)
            self._driver.stdout.close()
            self._folder.cleanup()

    def _call(self, method: str, path: str, body: dict | None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, path: Path, fragment: str = "") -> None:
        self._call("POST", "/url", {"url": "about:blank"})  # a change of fragment alone reloads not
        self._call("POST", "/url", {"url": f"{path.resolve().as_uri()}{fragment}"})

    def run(self, script: str):
        """The value that `script`, a function body, returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def wait_for(self, condition: str, seconds: float = 20) -> None:
        """Wait until the JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.05)

    def resize(self, width: int, height: int, phone: bool = False) -> None:
        self.command("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone,
        })  # fmt: skip

    def scheme(self, name: str) -> None:
        """Prefer the "light" or the "dark" color scheme."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.command("Emulation.setEmulatedMedia", {"features": [feature]})

    def command(self, name: str, params: dict):
        return self._call("POST", "/goog/cdp/execute", {"cmd": name, "params": params})

    def errors(self) -> list[str]:
        """Messages on the console since the last call."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot", None)))
