"""IntTravel's tables prepared simply, row by row in memory: the out-of-core preparation must give the same."""

import gzip
from pathlib import Path

import numpy as np

CODED = ("action_type", "geographic_id", "administrative_region_id", "weather", "travel_mode")
GAP = 5 * 60 * 1000


def read(folder: Path, name: str, columns: tuple[str, ...]) -> list[dict[str, str]]:
    rows = []
    for path in sorted(folder.glob(f"{name}[.-]*")):
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", newline="") as file:
            lines = [line.rstrip("\r\n").split("\t") for line in file]
        header = lines.pop(0) if lines[0][0] in columns else list(columns)
        rows += [dict(zip(header, line, strict=True)) for line in lines]
    return rows


def prepare(folder: Path) -> dict:
    """{"places": {id: (score, cell, category, region)}, "users": {id: (profile, sessions)}, "values": …} with codes."""
    place_columns = ("poi_id", "normalized_score", "geographic_id", "category_id", "administrative_region_id")
    action_columns = ("user_id", "timestamp", CODED[0], "poi_id", *CODED[1:], "via_poi_id")
    profile_columns = ("user_id", *(f"profile_feature_{k}" for k in range(1, 7)))
    places = {row["poi_id"]: row for row in read(folder, "poi_info", place_columns)}
    for row in read(folder, "poi_info_groupby_geographic", ("geographic_id", "poi_info")):
        for item in filter(None, row["poi_info"].split(";")):
            poi, score, category, region = item.split(",")
            values = (poi, score, row["geographic_id"], category, region)
            places.setdefault(poi, dict(zip(place_columns, values, strict=True)))
    actions = read(folder, "user_action", action_columns)
    profiles = {row["user_id"]: row for row in read(folder, "user_profile", profile_columns)}

    values = {name: {int(row[name]) for row in actions if row[name]} for name in CODED}
    values["category_id"] = set()
    for place in places.values():
        for name in ("geographic_id", "category_id", "administrative_region_id"):
            values[name] |= {int(place[name])} if place[name] else set()
    for name in profile_columns[1:]:
        values[name] = {int(row[name]) for row in profiles.values() if row[name]}
    codes = {name: {value: code for code, value in enumerate(sorted(known), 1)} for name, known in values.items()}

    def code(row: dict[str, str], name: str) -> int:
        return codes[name][int(row[name])] if row[name] else 0

    ids = sorted(int(poi) for poi in places)
    row_of = {str(poi): row for row, poi in enumerate(ids)} | {"": -1}
    users: dict[int, list] = {}
    for row in actions:
        users.setdefault(int(row["user_id"]), []).append(row)
    result = {}
    for user, rows in users.items():
        rows.sort(key=lambda row: int(row["timestamp"]))  # stable: ties stay as they are in the table
        sessions, before, starts = [], None, []
        for number, row in enumerate(rows):
            place, via, time = row_of[row["poi_id"]], row_of[row["via_poi_id"]], int(row["timestamp"])
            action, cell, region, weather, mode = (code(row, name) for name in CODED)
            joins = before is not None and place >= 0 and via < 0 and before[1:] == (place, via)
            if joins and time - before[0] <= GAP:
                sessions[-1] = (*sessions[-1][:1], action, *sessions[-1][2:6], mode or sessions[-1][6], via)
            else:
                sessions.append((time, action, place, cell, region, weather, mode, via))
                starts.append(number)
            before = (time, place, via)
        ends = [*starts[1:], len(rows)] if starts else []
        departures = [depart(rows, start, end) for start, end in zip(starts, ends, strict=True)]
        sessions = [(*session, when) for session, when in zip(sessions, departures, strict=True)]
        profile = profiles.get(str(user))
        features = tuple(code(profile, name) if profile else 0 for name in profile_columns[1:])
        result[user] = (features, sessions)
    described = {
        int(poi): (np.float32(place["normalized_score"]), *(code(place, name) for name in place_columns[2:]))
        for poi, place in places.items()
    }
    return {"places": described, "users": result, "sizes": {name: len(known) + 1 for name, known in codes.items()}}


def depart(rows: list[dict[str, str]], start: int, end: int) -> int:
    """1 + hours from row ``start`` until the user sets out for its place; 49 for two days or more, or never."""
    first = rows[start]
    if not first["poi_id"]:
        return 0
    own = [row for row in rows[start:end] if row["action_type"] == "3"]
    same = [row for row in rows[start:] if all(row[name] == first[name] for name in ("poi_id", "geographic_id"))]
    for row in own + [row for row in same if row["action_type"] == "3"]:
        return 1 + min((int(row["timestamp"]) - int(first["timestamp"])) // 3_600_000, 48)
    return 49


def shard_of(user: np.ndarray, shards: int) -> np.ndarray:
    mixed = user.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    return mixed % np.uint64(shards)
