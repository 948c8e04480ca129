"""JSON schemas of every kind, and random ones."""

from hypothesis import strategies as st

NODE = {
    "type": "object",
    "properties": {"v": {"enum": [0, 1]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
RECURSIVE = {"$defs": {"node": NODE}, "$ref": "#/$defs/node"}
TREE = {
    "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
    "$ref": "#/$defs/tree",
}
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "duration")
LISTED = [
    {},
    True,
    {"type": "object"},
    {"type": "null"},
    {"type": ["integer", "null", "boolean"]},
    {"const": {"a": [1, "x", None]}},
    {"enum": ["é", "雪", "😀", 'a"b\\c\n', 3, None, False]},
    {"type": "string", "pattern": "^[a-f]{2,4}-\\d+$"},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "integer", "minimum": -7, "exclusiveMaximum": 12},
    {"type": "number", "exclusiveMinimum": 0.25, "maximum": 3.5},
    {"type": "integer", "minimum": 10, "maximum": 30, "multipleOf": 5},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "x"}], "items": False, "minItems": 2},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "properties": {"é": {"const": "ü"}, "雪": {"type": "null"}}, "required": ["é"]},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "array", "items": {"type": "null"}, "maxItems": 3}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 9}]},
    {"oneOf": [{"type": "boolean"}, {"const": "neither"}]},
    RECURSIVE,
    TREE,
    *({"type": "string", "format": kind} for kind in FORMATS),
]

_WORDS = ["a", "b1", "name", "é", "雪 x", "long_key", "$id2"]
_STRINGS = st.one_of(
    st.fixed_dictionaries({"type": st.just("string"), "maxLength": st.integers(1, 8)}),
    st.fixed_dictionaries({"type": st.just("string"), "minLength": st.just(1), "maxLength": st.integers(1, 4)}),
    st.sampled_from([{"type": "string", "pattern": "^[a-z]{1,6}$"}, {"type": "string", "pattern": "^(x|yz){1,3}$"}]),
    st.fixed_dictionaries({"type": st.just("string"), "format": st.sampled_from(FORMATS[:5])}),
)
_NUMBERS = st.one_of(
    st.integers(-200, 200).flatmap(
        lambda low: st.integers(0, 300).map(lambda more: {"type": "integer", "minimum": low, "maximum": low + more})
    ),
    st.integers(-20, 20).map(lambda low: {"type": "number", "minimum": low / 4, "maximum": low / 4 + 3}),
)
_VALUES = st.sampled_from([None, True, False, 0, -3, 2.5, "x", "ü", "two words", [], [1, "a"], {"k": None}])
_LEAVES = st.one_of(
    _STRINGS,
    _NUMBERS,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.lists(_VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    _VALUES.map(lambda value: {"const": value}),
)


def _objects(of):
    def schema(properties, required, more):
        names = [name for name in properties if name in required]
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": more}

    more = st.one_of(st.just(False), st.just({"type": "null"}))
    words = st.sampled_from(_WORDS)
    return st.builds(schema, st.dictionaries(words, of, max_size=4), st.sets(words, max_size=4), more)


def _arrays(of):
    return st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        of,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def _unions(of):
    return st.lists(of, min_size=1, max_size=3).map(lambda kinds: {"anyOf": kinds})


schemas = st.recursive(_LEAVES, lambda of: st.one_of(_objects(of), _arrays(of), _unions(of)), max_leaves=6)
