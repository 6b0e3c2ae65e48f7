"""The embedded journeys: people of a small city with homes, work, habits and tastes, in IntTravel's schema.

A destination depends on the hour and the weekday, on where the user is and came from (bars after restaurants), on the
weather, on the user's profile (students study, some people avoid what is popular) and history (favourites, weekly
habits). About half of the trips go where the user has been before, which is all that a visit counter can know.
"""

from dataclasses import dataclass

import numpy as np

from intbmoe.checks import require, require_positive_int
from intbmoe.tasks.travel.city import (
    BAR,
    CAFE,
    CATEGORIES,
    CINEMA,
    GYM,
    HOME,
    MALL,
    OFFICE,
    PARK,
    RESTAURANT,
    SCHOOL,
    SHOP,
    SIGHT,
    TASTES,
    City,
    locate,
    make_city,
)
from intbmoe.tasks.travel.data import (
    PROFILE_FEATURES,
    JourneyData,
    Places,
    Sessions,
    Sizes,
    find_departures,
    group_by_cell,
    split_times,
)

MINUTE = 60_000
DAY = 24 * 60 * MINUTE
START = 1_704_067_200_000  # Monday, 1 January 2024, 00:00 UTC
SLOTS = (8, 10, 13, 16, 19, 22)  # hours of the day at which people set out, plus or minus half an hour
MORNING, FORENOON, NOON, AFTERNOON, EVENING, NIGHT = range(6)
WORKER, STUDENT, RETIRED = range(3)
FAVOURITE_SHARE = (0.1, 0.25, 0.5)  # how often the adventurous, the average and the settled go to their favourite
SUN, CLOUDS, RAIN, SNOW = range(4)
WALK, BICYCLE, TRANSIT, CAR = range(4)
SEARCH, ROUTE, NAVIGATE = range(3)
HABITS = 2
BLOCK = 4096  # people simulated together


@dataclass(frozen=True)
class People:
    """The properties of the users, (U,) each unless noted otherwise."""

    kind: np.ndarray
    taste: np.ndarray
    settled: np.ndarray
    has_car: np.ndarray
    home: np.ndarray
    work: np.ndarray  # office or school; for the retired, a park
    favourite: np.ndarray  # (U, categories) places
    habit: np.ndarray  # (U, 7 · slots): the category of a weekly habit, −1 for none
    profile: np.ndarray  # (U, 6), 0 for unknown


def make_journeys(
    seed: int = 0, users: int = 2000, weeks: int = 16, sessions: tuple[int, int] = (40, 80), side: int = 8
) -> JourneyData:
    """Generate journeys; ``sessions`` is (least, most) per user, and each of ``side``² cells has about 40 places."""
    require_positive_int("users", users)
    require_positive_int("weeks", weeks)
    require_positive_int("side", side)
    slots = weeks * 7 * len(SLOTS)
    least, most = sessions
    require(1 <= least <= most <= slots, "sessions", sessions, f"(least, most) with 1 ≤ least ≤ most ≤ {slots}")
    city = make_city(np.random.default_rng([seed, 0]), side)
    weather = _make_weather(np.random.default_rng([seed, 1]), slots)
    blocks = []
    for first in range(0, users, BLOCK):
        random = np.random.default_rng([seed, 2, first])
        people = _make_people(random, city, min(BLOCK, users - first))
        taken = _choose_slots(random, people, slots, sessions)
        blocks.append((people.profile, *_travel(random, city, people, weather, taken)))
    profile, counts = (np.concatenate([block[part] for block in blocks]) for part in (0, 1))
    columns = {name: np.concatenate([block[2][name] for block in blocks]) for name in blocks[0][2]}
    ids = np.cumsum(np.random.default_rng([seed, 3]).integers(1, 50, size=len(city.cell)))
    return _encode(city, ids, profile, np.concatenate([[0], counts.cumsum()]), columns)


def _make_weather(random: np.random.Generator, slots: int) -> np.ndarray:
    fresh = random.choice(4, size=slots, p=(0.45, 0.25, 0.22, 0.08))
    stays = random.random(slots) < 0.7
    stays[0] = False
    return fresh[np.maximum.accumulate(np.where(stays, 0, np.arange(slots)))]


def _make_people(random: np.random.Generator, city: City, number: int) -> People:
    kind = random.choice(3, size=number, p=(0.6, 0.25, 0.15))
    taste = random.choice(len(TASTES), size=number, p=(0.45, 0.2, 0.35))
    settled = random.choice(len(FAVOURITE_SHARE), size=number)
    has_car = (random.random(number) < np.array([0.6, 0.15, 0.5])[kind]).astype(np.int64)

    def near(category: np.ndarray, origin: np.ndarray) -> np.ndarray:
        return city.choose(category, origin, taste, random.random((number, 2)))

    anywhere = random.integers(len(city.region), size=number)
    home = near(np.full(number, HOME), anywhere)
    work = near(np.array([OFFICE, SCHOOL, PARK])[kind], random.integers(len(city.region), size=number))
    around = np.where(random.random((number, CATEGORIES)) < 0.5, city.cell[home][:, None], city.cell[work][:, None])
    favourite = np.stack([near(np.full(number, k), around[:, k]) for k in range(CATEGORIES)], axis=1)
    favourite[:, HOME], favourite[np.arange(number), city.category[work]] = home, work

    habit = np.full((number, 7 * len(SLOTS)), -1)
    for _ in range(HABITS):
        when = random.integers(7, size=number) * len(SLOTS) + random.choice([NOON, EVENING, NIGHT], size=number)
        habit[np.arange(number), when] = random.choice([CAFE, BAR, GYM, SHOP, PARK, CINEMA], size=number)

    age = np.clip(np.array([2, 0, 4])[kind] + random.integers(0, 3, size=number), 0, 5)
    profile = np.stack([kind, age, taste, settled, has_car, random.integers(4, size=number)], axis=1) + 1
    profile[random.random(profile.shape) < 0.05] = 0
    return People(kind, taste, settled, has_car, home, work, favourite, habit, profile)


def _choose_slots(random: np.random.Generator, people: People, slots: int, sessions: tuple[int, int]) -> np.ndarray:
    """Return (U, most): the slots in which each user travels, ascending, padded with −1 at the front."""
    number, (least, most) = len(people.kind), sessions
    weight = np.tile(np.array([1.0, 0.5, 1.0, 0.6, 1.2, 0.9]), slots // len(SLOTS))
    key = random.random((number, slots)) ** (1 / weight)  # the largest of these are a sample without replacement
    keep = np.argpartition(-key, most - 1, axis=1)[:, :most]
    count = random.integers(least, most + 1, size=number)
    keep[np.arange(most) >= count[:, None]] = -1
    return np.sort(keep, axis=1)


def _wishes() -> np.ndarray:
    """Return (kinds, weekend, slots, categories): how much people want to go where, before other factors."""
    wish = np.full((3, 2, len(SLOTS), CATEGORIES), 0.05)
    wish[..., HOME] = 0.5
    for kind, occupation in ((WORKER, OFFICE), (STUDENT, SCHOOL)):
        wish[kind, 0, MORNING, occupation] = 8
        wish[kind, 0, FORENOON, occupation] = 3
        wish[kind, 0, AFTERNOON, occupation] = 1.5
    wish[:, :, FORENOON, CAFE] += 2
    wish[:, :, NOON, RESTAURANT] += 5
    wish[:, :, NOON, CAFE] += 1
    wish[:, :, AFTERNOON, SHOP] += 2
    wish[:, :, EVENING, RESTAURANT] += 2
    wish[:, :, EVENING, HOME] += 1.5
    wish[:, :, NIGHT, HOME] += 3
    wish[:, :, NIGHT, BAR] += 1.5
    wish[:, 0, EVENING, GYM] += 1.5
    wish[:, 1, MORNING, GYM] += 1.5
    wish[:, 1, MORNING, CAFE] += 2
    wish[:, 1, FORENOON:EVENING, SIGHT] += 2.5
    wish[:, 1, AFTERNOON, MALL] += 3
    wish[:, 1, AFTERNOON, PARK] += 3
    wish[:, 1, EVENING, CINEMA] += 2
    wish[STUDENT, :, EVENING:, BAR] += 2
    wish[RETIRED, :, MORNING:NOON, PARK] += 4
    wish[RETIRED, :, FORENOON, SHOP] += 3
    wish[RETIRED, :, EVENING:, HOME] += 4
    return wish


def _sequels() -> np.ndarray:
    """Return (categories, categories): how much more likely the second becomes after the first."""
    factor = np.ones((CATEGORIES, CATEGORIES))
    np.fill_diagonal(factor, 0.05)
    factor[RESTAURANT, [BAR, CINEMA]] = 5
    factor[CINEMA, BAR] = 6
    factor[[GYM, SIGHT, SCHOOL, PARK], CAFE] = 8, 5, 5, 4
    factor[[SIGHT, MALL], RESTAURANT] = 3, 4
    factor[[SHOP, BAR], HOME] = 8
    factor[OFFICE, GYM] = 3
    return factor


WISHES, SEQUELS = _wishes(), _sequels()
BY_WEATHER = np.ones((4, CATEGORIES))
BY_WEATHER[RAIN, [PARK, SIGHT, MALL, CINEMA]] = BY_WEATHER[SNOW, [PARK, SIGHT, MALL, CINEMA]] = 0.1, 0.5, 3, 3
BY_WEATHER[SUN, [PARK, CAFE]] = 2, 1.5


def _travel(
    random: np.random.Generator, city: City, people: People, weather: np.ndarray, taken: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return sessions per user, and all their columns; one step of the loop is one session of every user."""
    number, most = taken.shape
    everyone = np.arange(number)
    last, last_day = people.home, np.full(number, -1)
    steps = []
    for step in range(most):
        slot = taken[:, step]
        day, part = np.divmod(slot, len(SLOTS))
        # People are where the day's last trip went, otherwise at work or at home, depending on the hour.
        working = (day % 7 < 5) & (people.kind != RETIRED) & (part >= NOON) & (part <= EVENING)
        guess = np.where(working & (random.random(number) < 0.85), people.work, people.home)
        at = np.where(day == last_day, last, guess)
        category = _choose_category(random, city, people, at, slot, weather[slot])
        place = city.choose(category, city.cell[at], people.taste, random.random((number, 2)))
        own = random.random(number) < np.array(FAVOURITE_SHARE)[people.settled]
        own |= (category == HOME) | (category == city.category[people.work])
        own |= people.habit[everyone, slot % people.habit.shape[1]] == category
        place = np.where(own, people.favourite[everyone, category], place)
        wandered = random.random(number) < 0.05
        origin = np.where(wandered, random.integers(len(city.region), size=number), city.cell[at])
        steps.append(_record(random, city, people, origin, place, own, slot, weather[slot]))
        going = slot >= 0
        last, last_day = np.where(going, place, last), np.where(going, day, last_day)
    going = (taken >= 0).ravel()
    columns = {name: np.stack([one[name] for one in steps], axis=1).ravel()[going] for name in steps[0]}
    return (taken >= 0).sum(1), columns


def _choose_category(
    random: np.random.Generator, city: City, people: People, at: np.ndarray, slot: np.ndarray, weather: np.ndarray
) -> np.ndarray:
    day, part = np.divmod(slot, len(SLOTS))
    weekend = (day % 7 >= 5).astype(int)
    wish = WISHES[people.kind, weekend, part] ** 1.3 * SEQUELS[city.category[at]] * BY_WEATHER[weather]
    total = wish.cumsum(1)
    chosen = (total < random.random((len(at), 1)) * total[:, -1:]).sum(1)
    habit = people.habit[np.arange(len(at)), slot % people.habit.shape[1]]
    keeps = (habit >= 0) & (habit != city.category[at]) & (random.random(len(at)) < 0.8)
    return np.where(keeps, habit, chosen)


def _record(
    random: np.random.Generator,
    city: City,
    people: People,
    origin: np.ndarray,
    place: np.ndarray,
    known: np.ndarray,
    slot: np.ndarray,
    weather: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return what the app records about one trip of every user: codes from 1, 0 for missing."""
    number = len(place)
    distance = city.distance[origin, city.cell[place]]
    wet = weather >= RAIN
    far = np.where(people.has_car == 1, CAR, TRANSIT)
    mode = np.where(distance < 1, WALK, np.where((distance < 3) & ~wet & (people.has_car == 0), BICYCLE, far))
    mode = np.where(random.random(number) < 0.1, random.integers(4, size=number), mode)
    action = np.where(mode == CAR, NAVIGATE, np.where(known, ROUTE, SEARCH))
    stop = city.choose(np.full(number, CAFE), origin, people.taste, random.random((number, 2)))
    via = np.where((random.random(number) < 0.05) & (stop != place), stop, -1)
    day, part = np.divmod(slot, len(SLOTS))
    minutes = np.array(SLOTS)[part] * 60 + random.integers(-30, 31, size=number)
    return {
        "time": START + day * DAY + minutes * MINUTE + random.integers(MINUTE, size=number),
        "action": action + 1,
        "place": place,
        "cell": origin + 1,
        "region": city.region[origin] + 1,
        "weather": np.where(random.random(number) < 0.02, 0, weather + 1),
        "mode": np.where(random.random(number) < 0.1, 0, mode + 1),
        "via": via,
    }


def _encode(
    city: City, ids: np.ndarray, profile: np.ndarray, offsets: np.ndarray, columns: dict[str, np.ndarray]
) -> JourneyData:
    """Return the arrays, with codes that all occur, as IntTravel's preparation would give."""
    columns = dict(columns)
    sets_out = columns["action"] == NAVIGATE + 1
    row_of = np.random.default_rng(len(ids)).permutation(len(ids))  # otherwise a place's number would show its category
    place_of = np.argsort(row_of)
    place_cell, columns["cell"], cells = _compact(city.cell[place_of] + 1, columns["cell"])
    place_region, columns["region"], regions = _compact(city.region[city.cell[place_of]] + 1, columns["region"])
    category, _, categories = _compact(city.category[place_of] + 1)
    sizes = {}
    for name in ("weather", "mode", "action"):
        columns[name], _, sizes[name + "s"] = _compact(columns[name])
    features = [_compact(profile[:, k]) for k in range(PROFILE_FEATURES)]
    columns["place"] = row_of[columns["place"]]
    columns["via"] = np.where(columns["via"] < 0, -1, row_of[columns["via"]])
    time = columns["time"].astype(np.int64)
    user = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    columns["depart"] = find_departures({**columns, "user": user}, np.arange(len(time)), sets_out)
    del columns["time"]
    described = (ids, city.score[place_of], place_cell, category, place_region)
    places = Places(*described, *group_by_cell(place_cell, cells), *locate(city, place_of))
    shard = Sessions(
        offsets=offsets.astype(np.int64),
        profile=np.stack([feature[0] for feature in features], axis=1),
        time=time,
        **{name: column.astype(np.int32) for name, column in columns.items()},
    )
    sizes["profile"] = tuple(feature[2] for feature in features)
    every = Sizes(len(ids), cells, regions, categories, **sizes)
    return JourneyData(places, [shard], every, *split_times(lambda: [time]))


def _compact(codes: np.ndarray, more: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, int]:
    """Renumber the codes of both arrays 1, 2, … in order without gaps, and count them, including 0."""
    more = codes[:0] if more is None else more
    used = np.union1d(codes, more)
    used = used[used > 0]

    def renumber(values: np.ndarray) -> np.ndarray:
        return np.where(values > 0, np.searchsorted(used, values) + 1, 0).astype(np.int32)

    return renumber(codes), renumber(more), len(used) + 1
