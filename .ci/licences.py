"""Lists the installed packages with name, version and licence, as a table or (--json) as CycloneDX.

A licence is what the package says of itself: an SPDX expression, else its classifiers, else its licence field.
"""

import json
import sys
from importlib.metadata import Distribution, distributions

UNKNOWN = "not said"


def licence(package: Distribution) -> str:
    about = package.metadata
    if about["License-Expression"]:
        return about["License-Expression"]
    named = [entry.rpartition(" :: ")[2] for entry in about.get_all("Classifier", []) if entry.startswith("License ::")]
    if named:
        return ", ".join(named)
    written = (about["License"] or "").strip().splitlines()  # some packages have the whole text there
    return written[0].strip() if written and len(written[0]) < 80 else UNKNOWN


def main() -> None:
    packages = sorted(
        {(p.metadata["Name"], p.version, licence(p)) for p in distributions()}, key=lambda p: p[0].lower()
    )
    if sys.argv[1:] == ["--json"]:
        parts = [
            {
                "type": "library",
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{version}",
                "licenses": [{"license": {"name": said}}],
            }
            for name, version, said in packages
        ]
        bill = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": parts}
        sys.stdout.write(json.dumps(bill, indent=2) + "\n")
    else:
        width = max(len(f"{name} {version}") for name, version, _ in packages)
        sys.stdout.writelines(f"{f'{name} {version}':{width}}  {said}\n" for name, version, said in packages)


main()
