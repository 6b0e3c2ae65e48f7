"""Check-ins as journeys: the next place of a user, with what is known before the user goes there.

The scenario of a session has the hour and the weekday of the check-in itself, the time since the previous one, and the
cell and the region of the place *before*; that place, with its category, is the previous intention in the sequence. As
is usual for next-place prediction, the time of a check-in is taken as known, but not where it is. The user is the first
feature of the profile. Weather, travel modes, actions and via points are unknown.

A cell is a square of ``CELL`` degrees, a region one of ``REGION`` degrees.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from intbmoe.tasks.arrays import VISITS, check_length, check_visits, read_arrays, refuse
from intbmoe.tasks.own_data import require_path
from intbmoe.tasks.travel.data import HOUR, PROFILE_FEATURES, JourneyData, Sessions, Sizes, bare_places, split_times

WHAT, PAGE = "an .npz file of check-ins with places", "docs/data.md"
CELL, REGION = 0.02, 0.25  # degrees: about 2 and 25 km
WEEK = 7 * 24  # hours


def read_check_ins(path: str | None) -> JourneyData:
    """Read ``user``, ``poi``, ``time`` (seconds, UTC) of each check-in, ``poi_lat`` and ``poi_lon`` of each place.

    Optional: ``poi_category`` of each place, and ``hour`` and ``dow`` of each check-in in the user's local time.
    """
    file = require_path(path, "check-ins", WHAT, PAGE)
    arrays = read_arrays(file, WHAT, VISITS, ("poi_lat", "poi_lon"), ("poi_category", "hour", "dow"))
    offsets = check_visits(file, arrays)
    _check_places(file, arrays)
    place, category = arrays["poi"].astype(np.int32), arrays.get("poi_category")
    categories = np.zeros(len(arrays["poi_lat"]), np.int64) if category is None else category + 1
    cell, region = _squares(arrays, CELL), _squares(arrays, REGION)
    places = bare_places(cell, int(cell.max()) + 1, categories.astype(np.int32), region)
    places = replace(places, longitude=arrays["poi_lon"], latitude=arrays["poi_lat"])
    users, nothing = len(offsets) - 1, np.zeros(len(place), np.int32)
    before = np.append(-1, place[:-1])
    before[offsets[:-1]] = -1
    time = 1000 * arrays["time"]
    shard = Sessions(
        offsets=offsets,
        profile=np.pad(np.arange(1, users + 1, dtype=np.int32)[:, None], ((0, 0), (0, PROFILE_FEATURES - 1))),
        time=time,
        place=place,
        cell=np.where(before >= 0, cell[before], 0),
        region=np.where(before >= 0, region[before], 0),
        via=nothing - 1,
        clock=_clock(file, arrays),
        **dict.fromkeys(("action", "weather", "mode"), nothing),
    )
    profile = (users + 1, *[1] * (PROFILE_FEATURES - 1))
    codes = (int(column.max()) + 1 for column in (cell, region, categories))
    return JourneyData(places, [shard], Sizes(len(cell), *codes, 1, 1, 1, profile), *split_times(lambda: [time]))


def _check_places(file: Path, arrays: dict[str, np.ndarray]) -> None:
    places = len(arrays["poi_lat"])
    for name in ("poi_lon", "poi_category"):
        if name in arrays:
            check_length(file, arrays, name, "poi_lat")
    poi = arrays["poi"]
    refuse((poi < 0) | (poi >= places), f"{file}: 'poi'", poi, f"numbers from 0 to {places - 1}, as 'poi_lat' has rows")
    for name, limit in (("poi_lat", 90), ("poi_lon", 180)):
        refuse(~(np.abs(arrays[name]) <= limit), f"{file}: {name!r}", arrays[name], f"degrees from −{limit} to {limit}")
    if "poi_category" in arrays:
        refuse(arrays["poi_category"] < 0, f"{file}: 'poi_category'", arrays["poi_category"], "numbers from 0 on")
    refuse(arrays["time"] < 0, f"{file}: 'time'", arrays["time"], "seconds since 1970")


def _squares(arrays: dict[str, np.ndarray], side: float) -> np.ndarray:
    """Return (P,) codes, from 1, of the squares that the places lie in; squares without a place have no code."""
    corners = np.floor(np.stack([arrays["poi_lat"], arrays["poi_lon"]], 1) / side)
    return (1 + np.unique(corners, axis=0, return_inverse=True)[1].ravel()).astype(np.int32)


def _clock(file: Path, arrays: dict[str, np.ndarray]) -> np.ndarray | None:
    """Return (N,) milliseconds that users' clocks are ahead of UTC; None if the file lacks ``hour`` or ``dow``."""
    if "hour" not in arrays or "dow" not in arrays:
        return None
    for name, most in (("hour", 23), ("dow", 6)):
        check_length(file, arrays, name, "user")
        refuse(
            (arrays[name] < 0) | (arrays[name] > most), f"{file}: {name!r}", arrays[name], f"numbers from 0 to {most}"
        )
    hours = arrays["time"] // 3600 + 3 * 24  # 1 January 1970 was a Thursday, day 3 of a week from Monday
    return ((arrays["dow"] * 24 + arrays["hour"] - hours + WEEK // 2) % WEEK - WEEK // 2) * HOUR
