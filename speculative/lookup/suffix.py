"""Suffix drafting: what most often followed these tokens, in this sequence or in what the engine wrote before.

Source: Oliaro et al., "SuffixDecoding" (arXiv 2411.04975); the tree grows in place as that of Snowflake's Arctic
Inference does. Drafts are point masses.

The distribution of a request stays its own, whatever is remembered of others: their texts are independent of its random
numbers, unless they were drawn with its very seed, and those are not shown to it. What may depend on the past is where
the rounds of a sampled text begin, and so which text of its distribution a seed gives; a reproducible request always
gets the same."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from speculative.drafters import drafter
from speculative.options import OptionError, Options, option
from speculative.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SuffixOptions(Options):
    """Lengths that are looked for, and the size of the remembered past: about 300 bytes a token."""

    suffix_depth: int = option(32, "`suffix`: longest suffix that is kept, in tokens.", least=1, most=256)
    suffix_min_match: int = option(2, "`suffix`: shortest suffix that drafts, in tokens.", least=1)
    suffix_min_probability: float = option(0.1, "`suffix`: least probability of a whole draft.", least=0, most=1)
    suffix_max_tokens: int = option(
        65536, "`suffix`: tokens of past outputs that are kept; 0 looks only into the sequence itself.", least=0
    )

    def check(self) -> None:
        """The shortest suffix is no longer than the longest."""
        if self.suffix_min_match > self.suffix_depth:
            rule = f"must be at most suffix_depth ({self.suffix_depth}), got {self.suffix_min_match}."
            raise OptionError("suffix_min_match", rule)


@drafter("suffix", SuffixOptions)
class SuffixDrafter:
    """Looks for the longest suffix that was seen before, and drafts its most frequent continuation.

    Of equally long matches the sequence's own comes first, then that in the newer outputs. A draft ends where its
    probability, the product of its tokens' shares among what followed, falls below `suffix_min_probability`.
    """

    def __init__(self, options: SuffixOptions, max_drafts: int) -> None:
        self._options = options
        self._tree_depth = options.suffix_depth + max_drafts  # a draft fits behind the longest match
        self._past = PastOutputs(self._tree_depth, options.suffix_max_tokens)
        self._indexes: dict[str, tuple[Sequence, SuffixTree]] = {}  # of each running request

    def forget(self, request_id: str) -> None:
        """Drop the index of a request that has left, and remember what it wrote."""
        index = self._indexes.pop(request_id, None)
        if index is not None:
            self._past.remember(index[0])

    def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
        """Up to `max_drafts` tokens; none where no suffix was seen before."""
        return self.find(sequence, max_drafts)[0]

    def find(self, sequence: Sequence, max_drafts: int) -> tuple[list[int], int]:
        """Return drafts, and the length of the suffix that was seen before."""
        request_id = sequence.request.request_id
        if request_id not in self._indexes:
            self._indexes[request_id] = sequence, SuffixTree(self._tree_depth)
        if max_drafts == 0:
            return [], 0
        own = self._indexes[request_id][1]
        own.extend(sequence.tokens[own.num_tokens :])
        tail = sequence.tokens[-self._options.suffix_depth :]
        trees = (own, *self._past.visible_to(sequence))
        matches = [tree.longest_match(tail, self._options.suffix_min_match) for tree in trees]
        longest = max(matches)
        tree = trees[matches.index(longest)]
        return (self._continue(tree, tail, longest, max_drafts) if longest else []), longest

    def _continue(self, tree: "SuffixTree", tail: list[int], match: int, max_drafts: int) -> list[int]:
        """Follow the tree; where what it remembers ends, match again with the draft so far, so that loops go on."""
        drafts: list[int] = []
        probability = 1.0
        while match:
            context = (tail + drafts)[-match:]
            path = tree.likeliest_path(
                context, max_drafts - len(drafts), self._options.suffix_min_probability / probability
            )
            drafts += path.token_ids
            probability *= path.probability
            if path.complete:
                break
            match = tree.longest_match((tail + drafts)[-len(tail) :], self._options.suffix_min_match)
        return drafts


class PastOutputs:
    """Outputs of finished requests, in two halves: the newer one grows, and the older is dropped when it is full.

    Args:
        depth: of the trees.
        max_tokens: both halves together; their memory is proportional to it. 0 = nothing is remembered.
    """

    def __init__(self, depth: int, max_tokens: int) -> None:
        self._depth = depth
        self._room = max_tokens // 2
        self._halves: list[tuple[SuffixTree, set[int]]] = []  # the newer first, each with the seeds of what was drawn

    def remember(self, sequence: Sequence) -> None:
        """Take in a finished sequence's output; of one that is too long, the end. One with a salt shares nothing."""
        output = sequence.tokens[sequence.num_prompt :][-self._room :]
        if self._room == 0 or not output or sequence.request.cache_salt:
            return
        if not self._halves or self._halves[0][0].num_tokens + len(output) > self._room:
            self._halves = [(SuffixTree(self._depth), set()), *self._halves[:1]]
        newer, seeds = self._halves[0]
        newer.extend(output)
        newer.end_text()
        if _is_drawn(sequence):
            seeds.add(sequence.request.seed)

    def visible_to(self, sequence: Sequence) -> list["SuffixTree"]:
        """Trees, newer first, without text that was drawn with the very random numbers that will judge the drafts."""
        seed = sequence.request.seed
        return [tree for tree, seeds in self._halves if not (_is_drawn(sequence) and seed in seeds)]


def _is_drawn(sequence: Sequence) -> bool:
    return sequence.params.temperature > 0


@dataclass(slots=True)
class _Node:
    """The end of an edge: a string that occurred, and where it goes on in more than one way or not at all."""

    count: int  # occurrences
    start: int  # index in the text of the edge's first token, where this string occurred last
    length: int  # tokens of the edge
    children: dict[int, "_Node"] = field(default_factory=dict)  # edges that go on from here, by their first token


@dataclass(frozen=True, slots=True)
class Path:
    """The likeliest continuation of a context, and its estimated probability."""

    token_ids: list[int]
    probability: float
    complete: bool  # it is as long as it was to be, or was cut for its low probability; False where the text ended


class SuffixTree:
    """Counts of every string of up to `depth` tokens in texts that grow, as a compressed tree.

    In O(depth) a token: every suffix that is still shorter than `depth` takes a step. Suffixes always end on nodes: an
    edge is split where one stops inside it, and put together again when it has gone on like all before it.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._text: list[int] = []
        self._root = _Node(count=0, start=0, length=0)  # 0: never taken for a node that one suffix alone has reached
        self._ends = [self._root]  # [d]: the node of the last d tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return len(self._text)

    def extend(self, token_ids: Tokens[int]) -> None:
        """Let the last text grow."""
        for token in token_ids:
            at = len(self._text)
            self._text.append(token)
            ends = self._ends
            if len(ends) <= self._depth:
                ends.append(self._root)
            # The longest first: where a shorter one arrives, the one before it has left.
            for depth in range(len(ends) - 1, 0, -1):
                ends[depth] = self._advance(ends[depth - 1], token, at)

    def end_text(self) -> None:
        """Let what comes next be another text."""
        self._ends = [self._root]

    def _advance(self, node: _Node, token: int, at: int) -> _Node:
        """Let the suffix that ends at `node` go on with `token`, which is the text's token number `at`."""
        child = node.children.get(token)
        if child is None:
            if node.count == 1:  # it is the only one that ever came here
                node.length += 1
                return node
            child = node.children[token] = _Node(count=1, start=at, length=1)
        elif node.count == child.count + 1:  # it goes where all others went
            node.length += 1
            if child.length == 1:
                node.children = child.children
            else:
                self._shorten(child)
                node.children = {self._text[child.start]: child}
            return node
        elif child.length == 1:
            child.count += 1
            child.start = at
        else:
            self._shorten(child)
            upper = _Node(child.count + 1, at, 1, {self._text[child.start]: child})
            child = node.children[token] = upper
        return child

    def _shorten(self, node: _Node) -> None:
        node.start += 1
        node.length -= 1

    def longest_match(self, tail: Tokens[int], least: int) -> int:
        """The length of the longest suffix of `tail` after which something is known to follow; 0 if below `least`."""
        longest, shortest_without = least - 1, len(tail) + 1
        while shortest_without - longest > 1:  # what follows a string follows its suffixes, too
            length = (longest + shortest_without) // 2
            found = self._find(tail[len(tail) - length :])
            if found is not None and (found[1] < found[0].length or found[0].children):
                longest = length
            else:
                shortest_without = length
        return longest if longest >= least else 0

    def likeliest_path(self, context: Tokens[int], most: int, least_probability: float) -> Path:
        """The most frequent token after `context`, then that after both, and so on; of equally frequent, the latest.

        Args:
            context: tokens that occurred.
            most: length of the path.
            least_probability: the path ends before the product of its tokens' shares falls below.
        """
        found = self._find(context)
        if found is None:
            return Path([], 1.0, complete=False)
        node, used = found
        path: list[int] = []
        probability = 1.0
        while len(path) < most:
            if used == node.length:
                if not node.children:
                    return Path(path, probability, complete=False)
                followed = sum(child.count for child in node.children.values())
                node, used = max(node.children.values(), key=lambda child: (child.count, child.start)), 0
                if probability * node.count / followed < least_probability:
                    return Path(path, probability, complete=True)
                probability *= node.count / followed
            taken = min(node.length - used, most - len(path))
            path += self._text[node.start + used : node.start + used + taken]
            used += taken
        return Path(path, probability, complete=True)

    def _find(self, tokens: Tokens[int]) -> tuple[_Node, int] | None:
        """The edge that `tokens` end on, and how many of its tokens they take; None where they never occurred."""
        node, used, matched = self._root, 0, 0
        while matched < len(tokens):
            child = node.children.get(tokens[matched])
            if child is None:
                return None
            node, used = child, min(child.length, len(tokens) - matched)
            if self._text[node.start : node.start + used] != tokens[matched : matched + used]:
                return None
            matched += used
        return node, used
