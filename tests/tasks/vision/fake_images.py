"""Small fake data sets in the layouts the sources read."""

import io
import tarfile

import numpy as np
from PIL import Image

from intbmoe.models.vit import ViTConfig


def picture(label, number, width=40, height=36):
    """An image whose flat colour, which survives JPEG, encodes its label (red) and number (green)."""
    array = np.zeros((height, width, 3), dtype=np.uint8)
    array[..., 0], array[..., 1], array[..., 2] = 40 * label + 20, 10 * number + 20, 128
    return array


def encode(array, form="JPEG"):
    content = io.BytesIO()
    Image.fromarray(array).save(content, form, **({"quality": 95, "subsampling": 0} if form == "JPEG" else {}))
    return content.getvalue()


def sheet(label, rows, columns, tile=32):
    tiles = [[picture(label, row * columns + column, tile, tile) for column in range(columns)] for row in range(rows)]
    return np.concatenate([np.concatenate(row, axis=1) for row in tiles], axis=0)


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def sheets(classes=3):
    """The members of a tar: ten training tiles and six test tiles per class."""
    return {
        "classes.json": b"[]",
        **{f"train/{label:03d}.jpg": encode(sheet(label, 2, 5)) for label in range(classes)},
        **{f"val/{label:03d}.jpg": encode(sheet(label, 2, 3)) for label in range(classes)},
    }


def write_folder(root, classes=3, train=6, val=2):
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"image_{number}.JPEG").write_bytes(encode(picture(label, number)))
    return root


def write_parquet(root, classes=3, train=6, val=2):
    """Two training files with row groups of four, one validation file."""
    (root / "data").mkdir(parents=True)
    rows = [(encode(picture(label, number)), label) for number in range(train) for label in range(classes)]
    half = len(rows) // 2
    write_rows(root / "data" / "train-00000-of-00002.parquet", rows[:half])
    write_rows(root / "data" / "train-00001-of-00002.parquet", rows[half:])
    rows = [(encode(picture(label, number)), label) for number in range(val) for label in range(classes)]
    write_rows(root / "data" / "validation-00000-of-00001.parquet", rows)
    return root


def write_rows(file, rows, **columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [{"bytes": content, "path": f"{number}.JPEG"} for number, (content, _) in enumerate(rows)]
    table = pa.table({"image": images, "label": [label for _, label in rows]} | columns)
    pq.write_table(table, file, row_group_size=4)


def vit(**changes):
    """A small model for fake pictures of three classes."""
    sizes = {"image_size": 32, "patch_size": 16, "classes": 3, "dim": 16, "depth": 2, "heads": 2, "hidden": 16}
    return ViTConfig(**{**sizes, "moe_layers": (0,), **changes})
