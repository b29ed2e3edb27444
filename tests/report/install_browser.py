"""Installs the browser of tests/report where that can be done: as root on Debian. Elsewhere it says so and goes on;
the test then skips, or fails if CI is set."""

import os
import shutil
import subprocess
import sys

PACKAGES = ("chromium", "chromium-driver")
COMMANDS = ("chromium", "chromedriver")


def main() -> None:
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"{', '.join(missing)} not found. Install {' and '.join(PACKAGES)} to test the report in a browser.")
        return
    print(f"installing {' and '.join(PACKAGES)}", flush=True)
    quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    update = subprocess.run(["apt-get", "-qq", "update"], check=False, **quiet)  # type: ignore[call-overload]
    install = ["apt-get", "-qq", "-y", "--no-install-recommends", "install", *PACKAGES]
    installed = subprocess.run(install, check=False, **quiet)  # type: ignore[call-overload]
    if update.returncode or installed.returncode:
        print("the browser could not be installed; the tests will say what that means", file=sys.stderr)


if __name__ == "__main__":
    main()
