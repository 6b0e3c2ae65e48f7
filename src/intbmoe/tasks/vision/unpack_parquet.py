"""Write ImageNet's parquet files out as the image folder that trains fastest.

    python -m intbmoe.tasks.vision.unpack_parquet imagenet-1k imagenet

Files keep their bytes. Class folders are called by the label, 0000 to 0999, so labels stay what they were.
"""

import argparse
from pathlib import Path

from intbmoe.tasks.vision.imagenet_parquet import ParquetImages

SPLITS = {"train": "train", "validation": "val"}


def unpack(root: Path, output: Path) -> None:
    """``root/data/train-*.parquet`` and ``validation-*`` → ``output/train/<label>/`` and ``output/val/<label>/``."""
    for split, folder in SPLITS.items():
        images = ParquetImages.find(root, split)
        for index, label in enumerate(images.labels.tolist()):
            file = output / folder / f"{label:04d}" / f"{index:08d}.JPEG"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(images.content(index))


def main() -> None:
    parser = argparse.ArgumentParser(description="Unpack ImageNet's parquet files into an image folder.")
    parser.add_argument("root", type=Path, help="the folder with data/train-*.parquet")
    parser.add_argument("output", type=Path, help="the folder to write")
    arguments = parser.parse_args()
    unpack(arguments.root, arguments.output)


if __name__ == "__main__":
    main()
