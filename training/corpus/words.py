"""The vocabulary of the stories: plain lists, one subject each."""

from __future__ import annotations

from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SHE_NAMES: Final = _words(
    """
    Mira Lily Anna Rosa Ella Nora Clara Ivy Maya Zoe Ruby Hazel Luna Alice Emma Sara Lucy Mia Ada Daisy Olive
    Freya Greta Hana Ines June Kira Lena Molly Nina Olga Pippa Poppy Rita Sofia Tara Uma Vera Wanda Yara Willow
    Bella Cora Dora Edith Fiona Gina Holly Iris Jade
    """
)

HE_NAMES: Final = _words(
    """
    Tom Sam Ben Max Leo Finn Oscar Hugo Jack Toby Otto Milo Felix Theo Noah Eli Ravi Omar Pablo Hans Kenji Ivan
    Luis Marco Nico Oliver Peter Quinn Robin Simon Tim Victor Walter Yusuf Zack Arthur Bruno Carl David Emil
    Frank George Henry Isaac Jonas Karl Lars Martin Ned Paul
    """
)

SYLLABLE_STARTS: Final = _words(
    """
    Ba Be Bo Bri Da De Do Dra El Fa Fe Fi Fo Ga Gi Go Gra Ha Hi Ja Jo Ka Ke Ki Ko La Le Li Lo Ma Me Mi Mo Na Ne
    Ni No Or Pa Pe Pi Po Qui Ra Re Ri Ro Sa Se Shi So Ta Te Ti To Tru Um Va Ve Vi Wa Wi Xa Ya Yo Za Ze Zi
    """
)
SYLLABLE_MIDDLES: Final = _words(
    """
    ba da di fi go la li lo ma mi mo na ni no pa pi ra ri ro sa si ta ti to va vi za zo ren lan min dor bel
    """
)
SHE_SYLLABLES: Final = _words("la na ra li mi sa ya ta nia lia ria bel lyn dia nella rika")
HE_SYLLABLES: Final = _words("ko mo bo ro do to ren lon rik dor bert kin zo mus vin gar")

CONSONANTS: Final = _words("b c d f g h j k l m n p r s t v w x z br ch cl dr fl gr kr ph pl qu sh sk st th tr zh")
VOWELS: Final = _words("a e i o u a e i o u ai ee ie oa ou y")
SHE_ENDINGS: Final = _words("na la ra sa ma ta lia nia")
HE_ENDINGS: Final = _words("l m n r s t k x")

ANIMALS: Final = _words(
    """
    fox rabbit bear mouse owl frog cat dog hedgehog squirrel badger otter duck goose turtle sheep goat horse
    donkey pig cow hen crow sparrow swan deer wolf lion tiger elephant monkey panda penguin seal whale crab
    snail bee ant beetle butterfly lizard camel giraffe raccoon beaver mole bat parrot kitten puppy
    pony zebra koala kangaroo dolphin octopus eagle raven chicken bird snake spider moose llama hamster dinosaur
    """
)
CREATURES: Final = _words(
    "robot dragon ghost giant fairy elf dwarf snowman scarecrow troll mermaid goblin gnome monster alien"
)
WORKERS: Final = _words(
    """
    baker sailor farmer gardener teacher shepherd fisher clockmaker carpenter doctor singer pilot
    librarian tailor cook miller knight king wizard pirate painter soldier nurse inventor merchant clown
    """
)
GIRLS: Final = ("girl", "princess", "queen", "grandmother", "witch", "woman")
BOYS: Final = ("boy", "prince", "grandfather", "man")
HE_ONLY: Final = ("king",)
SHE_ONLY: Final = ("mermaid", "hen", "cow")

TRAITS: Final = _words(
    """
    brave kind clever shy curious gentle cheerful quiet patient proud funny careful honest lonely tiny young old
    busy hungry sleepy polite stubborn friendly lazy grumpy wise little playful
    """
)

HOMES: Final = (
    "in a small house by the river",
    "in a cottage at the edge of the forest",
    "in a hollow tree",
    "under an old bridge",
    "on top of a green hill",
    "in a village near the sea",
    "in a tower with a blue door",
    "on a little farm",
    "in a cave behind the waterfall",
    "in a big city",
    "in a boat on the lake",
    "in a tent in the desert",
    "at the end of a long street",
    "in a windmill",
    "in a lighthouse",
    "next to the market",
    "in a house with a red roof",
    "in a valley between two mountains",
)

# (name, preposition)
PLACES: Final = (
    ("forest", "in"), ("garden", "in"), ("meadow", "in"), ("harbor", "at"), ("market", "at"), ("beach", "on"),
    ("park", "in"), ("library", "in"), ("mountain", "on"), ("valley", "in"), ("orchard", "in"), ("castle", "in"),
    ("island", "on"), ("swamp", "in"), ("desert", "in"), ("school", "at"), ("bakery", "in"), ("train station", "at"),
    ("lake", "at"), ("barn", "in"), ("cave", "in"), ("old mill", "at"), ("playground", "on"), ("museum", "in"),
    ("river", "at"), ("hill", "on"), ("village square", "in"), ("greenhouse", "in"), ("lighthouse", "at"),
)  # fmt: skip

COLORS: Final = _words("red blue green yellow golden silver white black purple orange pink brown gray")
OBJECTS: Final = _words(
    """
    kite ball lantern key hat scarf drum bell book basket umbrella boat cup blanket map ring flute whistle coin
    box spoon bucket rope feather shell stone button mirror bottle backpack coat candle clock wagon pencil doll
    necklace crown mitten boot ribbon compass teapot flag violin bicycle
    """
)
FOODS: Final = (
    "apple pie",
    "vegetable soup",
    "fresh bread",
    "honey cakes",
    "pancakes",
    "warm porridge",
    "plum jam",
    "carrot cake",
    "roasted nuts",
    "berry pie",
    "cheese sandwiches",
    "pumpkin soup",
    "rice pudding",
    "baked potatoes",
    "lemon cookies",
    "pear tart",
    "noodle soup",
    "hot chocolate",
    "strawberry cake",
    "corn bread",
)

# adjective -> lines that set the scene
WEATHER: Final = {
    "sunny": ("It was a sunny {time}", "The sun was shining on that {time}, and it was sunny everywhere"),
    "rainy": ("It was a rainy {time}", "Rain fell softly on the roofs, for it was a rainy {time}"),
    "windy": ("It was a windy {time}", "The wind pushed the clouds along, for it was a windy {time}"),
    "snowy": ("It was a snowy {time}", "Snow lay over everything, for it was a snowy {time}"),
    "foggy": ("It was a foggy {time}", "Fog hung between the trees, for it was a foggy {time}"),
    "cloudy": ("It was a cloudy {time}", "Gray clouds covered the sky, for it was a cloudy {time}"),
    "stormy": ("It was a stormy {time}", "Thunder rolled far away, for it was a stormy {time}"),
    "cold": ("It was a cold {time}", "The puddles were covered with ice, for it was a cold {time}"),
    "warm": ("It was a warm {time}", "The air smelled of flowers, for it was a warm {time}"),
    "hot": ("It was a hot {time}", "Even the birds looked for shade, for it was a hot {time}"),
}
TIMES: Final = _words("morning afternoon evening day")

HIDING_PLACES: Final = (
    "under a pile of leaves", "behind the old oak", "inside a hollow log", "at the bottom of the stairs",
    "between two large stones", "on the roof of the barn", "in a bird's nest", "under the wooden bench",
    "behind the garden wall", "next to the well", "in the tall grass", "inside an empty barrel",
    "under the kitchen table", "on a high branch", "beside the gate", "in the bottom of a wagon",
)  # fmt: skip
FAMILY: Final = _words("grandmother grandfather mother father aunt uncle sister brother cousin neighbor")
FEARS: Final = (
    "the dark", "deep water", "thunder", "high places", "strangers", "loud noises", "the big bridge", "spiders",
    "being alone",
)  # fmt: skip
DREAMS: Final = (
    "see the sea", "touch the snow on the highest mountain", "count all the stars", "find the end of the rainbow",
    "hear the great bell of the city", "meet the moon", "see the flying fish", "visit the island of birds",
)  # fmt: skip
PROJECTS: Final = (
    ("a tree house", "boards"), ("a raft", "logs"), ("a snow lamp", "candles"), ("a bridge", "stones"),
    ("a flying machine", "feathers"), ("a puppet theater", "curtains"), ("a birdhouse", "nails"),
    ("a big soup", "carrots"), ("a birthday cake", "eggs"), ("a giant quilt", "wool"),
)  # fmt: skip
CONTESTS: Final = ("race", "singing contest", "boat race", "baking contest", "dancing contest", "kite contest")
SOUNDS: Final = ("a soft knock", "a strange humming", "a tiny sneeze", "a low whistle", "a sad song", "a quiet cry")
BABIES: Final = ("duckling", "kitten", "lamb", "baby owl", "puppy", "baby hedgehog", "baby dragon", "foal")
TRAPS: Final = ("in the mud", "in a deep hole", "in a thorny bush", "on a high rock", "under a fallen branch",
                "in an old net")  # fmt: skip
GOOD_FEELINGS: Final = _words("happy proud glad thankful relieved peaceful cheerful")
DAYS: Final = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
GOODS: Final = _words("apples pears eggs loaves candles books shells stones tickets pencils carrots cups roses fish")
