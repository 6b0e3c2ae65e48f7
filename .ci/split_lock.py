"""Splits a list of locked packages into locks/torch.txt, cuda.txt (only for CUDA builds of torch) and packages.txt.

A build of torch for the CPU needs none of CUDA's packages, which are gigabytes, and no marker tells the builds apart.
``.ci/install`` looks at the torch that is there.
"""

import re
import sys
from pathlib import Path

CUDA = re.compile(r"(nvidia|cuda)-")
CPU_BUILDS = {"2.13.0": ["6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"]}
"""SHA-256 of CPU builds of torch that are not on the usual index: 2.13.0+cpu for Python 3.11 on x86."""
HEAD = "# Written by .ci/lock from pyproject.toml and constraints.txt.\n"


def main(known: Path, folder: Path) -> None:
    packages = re.split(r"^(?=[a-z])", known.read_text(), flags=re.MULTILINE)[1:]
    parts = {"torch": "", "cuda": "", "packages": ""}
    for package in packages:
        name, version = re.match(r"([\w.-]+)(?:\[[\w,]*\])?==(\S+)", package).groups()
        if name == "torch":
            wanted = (f"    --hash=sha256:{digest}" for digest in CPU_BUILDS.get(version, ()))
            added = [line for line in wanted if line not in package]
            package = " \\\n".join([package.rstrip(), *added]) + "\n"
        parts["torch" if name == "torch" else "cuda" if CUDA.match(name) else "packages"] += package
    for name, text in parts.items():
        (folder / f"{name}.txt").write_text(HEAD + text)


main(Path(sys.argv[1]), Path(sys.argv[2]))
