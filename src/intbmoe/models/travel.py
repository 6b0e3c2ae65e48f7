"""The paper's travel model: from the sessions of a user to the place the user goes to next.

Letters: ``B`` users, ``S`` sessions of each, from old to new, ``C`` candidates of a session, ``d`` width.

    place p      e(p) = W LN(id + cell + category + region + score) + b, each an embedding; zero if there is no place
    profile      one token for each of six features
    session s    scenario_s    cell + region + weather + hour + weekday + gap (time since the session before)
                 intention_s   e(place)
                 feedback_s    mode + action + e(via)
    sequence     profile_1 … profile_6, scenario_1, intention_1, feedback_1, scenario_2, …    plus the kind of token
    prediction   y_s = ``Recommender`` at scenario_s: it has seen the profile, all sessions before s, and what was known
                 of session s before the user chose
    score        ⟨y_s, e(c)⟩ / √d for a candidate c, with the same e that intention tokens have
    copy         with ``copy``, y_s + κ · the mean of e(place) over the sessions before s; κ starts at √d

Other tasks are heads on the same backbone, each a linear map of one of its outputs:

    how          mode of travel, from y_s
    when         hours until the user sets out, from y_s: 0 to 47, or later
    via          the place of session s + 1, from the output at intention_s, scored as above

With ``head_by_task`` the backbone's head, a mixture, gets a one-hot vector of the task it predicts for: MMoE and PLE
have a gate for each task, DSFNet merges and IntBMoE composes by the vector. y_s then differs between tasks.

All inputs are codes, small integers with 0 for missing; a place is five codes. Users and places share the codes of
cells and regions. Embeddings are multi-hash (``hashing.py``), so a model can be built without the data. All fields
except ids and cells share one table, in which each code of each field has its own id.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.layer import MoELayer
from intbmoe.models.hashing import ConcatenatedHashEmbedding, MultiHashEmbedding
from intbmoe.models.recommender import Recommender, RecommenderConfig, RecommenderSizes
from intbmoe.precision import autocast_off, wide
from intbmoe.settings import Positive, PositiveInt

PROFILE_TOKENS = 6
SESSION_TOKENS = 3
PLACE = ("place", "cell", "category", "region", "score")  # in the order of a batch's last dimension
SCENARIO = ("cell", "region", "weather", "hour", "weekday", "gap")
FEEDBACK = ("mode", "action")
PROFILE = tuple(f"profile{number}" for number in range(1, PROFILE_TOKENS + 1))
# The fields that share one table.
FIELDS = ("category", "region", "score", "weather", "hour", "weekday", "gap", *FEEDBACK, *PROFILE)
DEPARTURES = 49  # classes of "when"
KINDS = (*PROFILE, "scenario", "intention", "feedback")
EMBEDDING_STD = 0.1


@dataclass(frozen=True, kw_only=True)
class TravelConfig(RecommenderSizes):
    """Sizes of the travel model; by default the backbone's are the paper's and the tables' are ours."""

    sessions: PositiveInt = 40
    """The largest number of sessions in a sequence, three tokens each, after six profile tokens."""
    place_rows: PositiveInt = 262_144
    """Rows of each table for place ids."""
    cell_rows: PositiveInt = 65_536
    """Rows of each table for cells."""
    code_rows: PositiveInt = 65_536
    """Rows of each table for all other codes; with 15 times the largest code, each code has its own row."""
    hashes: PositiveInt = 2
    """Tables of each kind."""
    primes: tuple[PositiveInt, ...] = ()
    """Rows of tables whose vectors are concatenated, as in the released code; empty to add vectors (place_rows, …)."""
    table_std: Positive = EMBEDDING_STD
    """Standard deviation of the initial embeddings of places and cells."""
    code_std: Positive = EMBEDDING_STD
    """Standard deviation of the initial embeddings of all other codes."""
    copy: bool = False
    """Whether to add the mean of earlier places, times a learned number, to a prediction; helps to count visits."""
    head_by_task: bool = False
    """Whether the head gets its task, for methods that take one (mmoe, ple, dsfnet, intbmoe); others ignore it."""
    modes: PositiveInt = 6
    """The number of modes of travel in the task "how"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = not self.primes or self.dim % len(self.primes) == 0
        require(fits, "primes", self.primes, f"empty, or a list whose length divides dim ({self.dim})")

    def backbone(self) -> RecommenderConfig:
        sizes = {f.name: getattr(self, f.name) for f in fields(RecommenderSizes)}
        return RecommenderConfig(**sizes, max_length=PROFILE_TOKENS + SESSION_TOKENS * self.sessions)


class TravelModel(nn.Module):
    """From sessions to predictions and scores. ``make_ffn`` makes each FFN and the head; without it all are dense."""

    def __init__(
        self,
        config: TravelConfig,
        make_ffn: Callable[[], nn.Module] | None = None,
        tasks: Sequence[str] = ("where",),
        make_head: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.places = self._table(config.place_rows)
        self.cells = self._table(config.cell_rows)
        self.codes = MultiHashEmbedding(config.code_rows, config.dim, config.hashes, config.code_std)
        self.kinds = nn.Parameter(torch.randn(len(KINDS), config.dim) * EMBEDDING_STD)
        self.place_norm = nn.LayerNorm(config.dim)
        self.place_map = nn.Linear(config.dim, config.dim)
        self.backbone = Recommender(config.backbone(), make_ffn, make_head)
        # The score divides by √d: if all past visits were to one place, its copy adds that vector's squared length.
        self.copy_scale = nn.Parameter(torch.tensor(config.dim**0.5)) if config.copy else None
        self.tasks = tuple(tasks)
        sizes = {"how": config.modes, "when": DEPARTURES, "via": config.dim}
        self.heads = nn.ModuleDict({task: nn.Linear(config.dim, sizes[task]) for task in tasks if task != "where"})

    def _table(self, rows: int) -> nn.Module:
        config = self.config
        if config.primes:
            return ConcatenatedHashEmbedding(config.primes, config.dim, config.table_std)
        return MultiHashEmbedding(rows, config.dim, config.hashes, config.table_std)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Score the candidates (N, C) of N target sessions; a batch without candidates gives predictions (B, S, d).

        With tasks besides "where", return the scores of each task: (N, modes) for "how", (N, 49) for "when", and for
        "via" the candidates' scores of those targets that have a previous session in the batch to predict from.

        profile (B, 6), scenario (B, S, 6), place (B, S, 5), feedback (B, S, 2), via (B, S, 5), candidates (B, S, C, 5)
        are codes; mask (B, S) is True for a session, targets (B, S) for a session whose candidates are to be scored.
        Values at padding have no influence.
        """
        tokens, mask = self.tokens(batch)
        states = self.backbone.states(tokens, mask)
        shared = self.backbone.predict(states, mask, **self.head_inputs("where"))
        predictions = self.add_copies(shared[:, PROFILE_TOKENS::SESSION_TOKENS], batch)
        if "candidates" not in batch:
            return predictions
        targets, candidates = batch["targets"], batch["candidates"]
        where = self.score(predictions[targets], candidates[targets])
        if not self.heads:
            return where
        scores = {"where": where}
        for task, head in self.heads.items():
            inputs = self.head_inputs(task)
            outputs = self.backbone.predict(states, mask, **inputs) if inputs else shared
            if task == "via":
                following = targets[:, 1:]
                intentions = outputs[:, PROFILE_TOKENS + 1 :: SESSION_TOKENS][:, :-1]
                scores[task] = self.score(head(intentions[following]), candidates[:, 1:][following])
            else:
                predictions = self.add_copies(outputs[:, PROFILE_TOKENS::SESSION_TOKENS], batch)
                scores[task] = head(predictions[targets])
        return scores

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """(B, S, d): the output at each session's scenario token."""
        outputs = self.backbone(*self.tokens(batch), **self.head_inputs("where"))
        return self.add_copies(outputs[:, PROFILE_TOKENS::SESSION_TOKENS], batch)

    def add_copies(self, predictions: Tensor, batch: Mapping[str, Tensor], at: Tensor | None = None) -> Tensor:
        """(B, S, d) outputs at the scenarios → predictions; for one session per user, ``at`` (B,), (B, d) → (B, d)."""
        if self.copy_scale is None:
            return predictions
        copies = mean_before(self.encode_places(batch["place"]), batch["mask"] & (batch["place"][..., 0] != 0))
        if at is not None:
            copies = copies[torch.arange(len(at), device=at.device), at]
        return predictions + self.copy_scale * copies

    def head_inputs(self, task: str) -> dict[str, Tensor]:
        """The extra inputs of the backbone's head for a task: none, or a one-hot vector of the task."""
        head = self.backbone.head
        if not (isinstance(head, MoELayer) and getattr(head.config, "conditioning_dim", 0)):  # some methods have none
            return {}
        places = torch.arange(len(self.tasks), device=self.kinds.device)
        return {"conditioning": (places == self.tasks.index(task)).to(self.kinds.dtype)}

    def tokens(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The sequence (B, 6 + 3S, d), and which of its tokens are valid."""
        mask = batch["mask"]
        sessions = mask.shape[1]
        if sessions > self.config.sessions:
            raise ValueError(f"{sessions} sessions: this model takes at most {self.config.sessions} (model.sessions)")
        scenario, feedback = batch["scenario"], batch["feedback"]
        session = [
            self.cells(scenario[..., 0]) + self.embed(scenario[..., 1:], SCENARIO[1:]).sum(-2),
            self.encode_places(batch["place"]),
            self.embed(feedback, FEEDBACK).sum(-2) + self.encode_places(batch["via"]),
        ]
        profile = self.embed(batch["profile"], PROFILE) + self.kinds[:PROFILE_TOKENS]
        session = torch.stack(session, 2) + self.kinds[PROFILE_TOKENS:]
        valid = torch.cat([mask.new_ones(mask.shape[0], PROFILE_TOKENS), mask.repeat_interleave(SESSION_TOKENS, 1)], 1)
        return torch.cat([profile, session.flatten(1, 2)], 1), valid

    def embed(self, codes: Tensor, fields: tuple[str, ...]) -> Tensor:
        """(…, F) codes of F fields → (…, F, d)."""
        numbers = torch.tensor([FIELDS.index(field) for field in fields], device=codes.device)
        ids = (codes.long() - 1) * len(FIELDS) + numbers + 1
        return self.codes(torch.where(codes > 0, ids, 0))

    def encode_places(self, places: Tensor) -> Tensor:
        """(…, 5) codes of places → (…, d), e(p); zero where there is no place."""
        features = self.places(places[..., 0]) + self.cells(places[..., 1])
        features = features + self.embed(places[..., 2:], PLACE[2:]).sum(-2)
        encoded = self.place_map(self.place_norm(features))
        return torch.where(places[..., :1] != 0, encoded, 0)

    def score(self, predictions: Tensor, candidates: Tensor) -> Tensor:
        """(N, d), (N, C, 5) → (N, C), in float32 or wider: with fewer digits, candidates would tie."""
        # A place may be a candidate in many sessions of a batch, so each place is encoded once.
        ids, where = candidates[..., 0].unique(return_inverse=True)
        distinct = candidates.new_zeros(len(ids), len(PLACE))
        distinct[where.flatten()] = candidates.flatten(0, 1)
        vectors = wide(self.encode_places(distinct))
        with autocast_off(predictions):
            y = wide(predictions) * self.config.dim**-0.5
            return (F.embedding(where, vectors) @ y.unsqueeze(-1)).squeeze(-1)


def mean_before(x: Tensor, known: Tensor) -> Tensor:
    """(B, S, d) and which of them count (B, S) → (B, S, d), the mean of those before each; zero if there are none."""
    earlier = known.new_ones(x.shape[1], x.shape[1]).tril(-1) & known.unsqueeze(1)
    with autocast_off(x):
        shares = earlier / earlier.sum(-1, keepdim=True).clamp(min=1)
        return shares.to(x.dtype) @ x
