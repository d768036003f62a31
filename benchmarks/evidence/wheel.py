"""Install the built wheel into an environment of its own and use it there: `dspark doctor`, and the tiny run.

    python benchmarks/evidence/wheel.py [--environment FOLDER]

1. Build the wheel of this checkout.
2. Make an environment (or take the one in --environment) with the versions of requirements.lock, and the wheel.
3. In an empty folder: `dspark doctor` finds no problem with the packages, `dspark run configs/tiny.yaml` publishes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, help="with the locked versions installed already")
    parser.add_argument("overrides", nargs="*", help="settings of the tiny run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        pip(Path(sys.executable).parent, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
        (wheel,) = folder.glob("*.whl")
        programs = (options.environment or folder / "environment") / "bin"
        if options.environment is None:
            subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
            lock = ROOT / "requirements.lock"
            torch = next(line for line in lock.read_text().splitlines() if line.startswith("torch=="))
            pip(programs, "install", torch)
            pip(programs, "install", "--requirement", str(lock))
        pip(programs, "install", "--no-deps", "--force-reinstall", str(wheel))
        work = folder / "work"
        work.mkdir()
        doctor = json.loads(dspark(programs, work, "doctor", "--json"))
        wrong = [problem for problem in doctor["problems"] if "needed" in problem or "not installed" in problem]
        assert not wrong, wrong
        done = json.loads(dspark(programs, work, "run", "configs/tiny.yaml", "--json", *options.overrides))
        published = work / done["directory"] / "published"
        assert (published / "model.safetensors").is_file()
        print(f"{wheel.name}: {len(done['stages'])} stages, {len(list(published.iterdir()))} published files")


def pip(programs: Path, *arguments: str) -> None:
    subprocess.run([programs / "python", "-m", "pip", "--quiet", *arguments], check=True)


def dspark(programs: Path, folder: Path, *arguments: str) -> str:
    """Standard output of the installed command, run outside the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [programs / "dspark", *arguments], cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


if __name__ == "__main__":
    main()
