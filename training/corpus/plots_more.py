"""More plots (see plots.py), and the openings and endings that all plots share."""

from __future__ import annotations

from typing import Final

from .plots import BUILD, FEAR, JOURNEY, LOST, MEET, MYSTERY, QUARREL, RESCUE, Plot

GIFT = Plot(
    "gift",
    "had no gift for {his} {family}",
    (
        "[Tomorrow was|The next day was] the birthday of {his} {family}, and {hero} had no gift. [{He} had no "
        'money|{His} purse was empty|All the shops were closed]. ["What shall I do?" {he} thought.|{hero} turned the '
        "whole house upside down, but {he} found nothing.|{hero} sat down and thought hard.]",
        MEET + ' {hero} told {friend} about the birthday. ["I know where you can find something," said '
        '{friend}.|"Look around {in_place}," said {friend}. "There are treasures {hiding}."|"The best gifts '
        'are not bought," said {friend} wisely.] So they went {to_place} together, and {hiding} they found an '
        "old {obj}.",
        "[It was dusty and broken|It was covered with dirt|It did not look like a gift], but {hero} [cleaned "
        "it|washed and repaired it|worked on it until midnight] and {friend} [tied a ribbon around it|made a box for "
        "it|wrote a card]. [In the end the {noun} looked like new|Now the {noun} was beautiful].",
        '[The next morning|On the birthday], {his} {family} opened the gift. ["A {noun}! It is the best gift of my '
        'life!"|"How did you know that I wanted a {noun}?"] [Everybody clapped|There were tears and laughter|They all '
        "danced], and {friend} got the biggest piece of the {food}.",
    ),
    (
        ("Whose birthday was it?", "the birthday of {his} {family}", "It was the birthday of {hero}'s {family}."),
        ("What was the gift?", "a {obj}", "The gift was a {obj}."),
        ("Where did they find the {noun}?", "{hiding}", "They found the {noun} {hiding}."),
        ("Who helped {hero}?", "{friend}", "{friend} the {fkind} helped {hero}."),
        ("What did they eat?", "{food}", "They ate {food}."),
    ),
)

CONTEST = Plot(
    "contest",
    "{friend} fell down",
    (
        "[Everyone was excited|There were flags everywhere|People came from far away], because there was a {contest} "
        "{in_place}. The prize was a {obj}. {hero} [had practiced for {count} weeks|wanted to win more than "
        "anything|had never won a prize].",
        'Next to {hero} stood a {ftrait} {fkind} named {friend}. ["Good luck," said {hero}.|"May the best one win," '
        'said {friend}.|"I am nervous," said {friend}. "Me too," said {hero}.] [The bell rang|Somebody blew a '
        'whistle|"Ready, steady, go!"] and the {contest} began.',
        "[Everything went well until|Halfway to the end,|All at once,] {friend} slipped and fell down. [Nobody "
        "stopped|The others only laughed|The others did not notice]. {hero} [could have won|was in front of "
        'everybody|saw the prize shining], but {he} turned around. ["Are you hurt?" asked {hero}.|"Give me your '
        'hand," said {hero}.] {hero} helped {friend} up, and they finished together, last of all.',
        '[Then the judge came to them|The judge stood up|But then there was a surprise]. "The prize goes to {hero}," '
        '[said the judge|called the judge|the judge said], "[because a good heart is worth more than first place|for '
        '{he} is the only one who stopped to help]." {hero} [showed the {noun} to {friend}|held up the {noun}], and '
        "{friend} cheered the loudest.",
    ),
    (
        ("What was the prize?", "a {obj}", "The prize was a {obj}."),
        ("Who fell down?", "{friend}", "{friend} the {fkind} fell down."),
        ("Who won the prize?", "{hero}", "{hero} won the prize."),
        ("Where was the {contest}?", "{in_place}", "The {contest} was {in_place}."),
    ),
)

SHELTER = Plot(
    "shelter",
    "a storm came up",
    (
        "{hero} was {in_place}, [far from home|picking flowers|looking for mushrooms], when [black clouds covered the "
        "sky|a storm came up|the sky turned dark]. [The first drops fell|Lightning flashed|The wind began to howl]. "
        "{hero} [ran as fast as {he} could|looked for shelter|held on to {his} hat], until {he} saw a small light "
        "{in_place2}.",
        '{hero} knocked. The door opened, and there stood a {ftrait} {fkind}. ["Come in, come in!" said the {fkind}. '
        '"My name is {friend}."|"You are all wet," said the {fkind}. "I am {friend}. Come in and get warm."] {friend} '
        "[made a fire|put wood on the fire] and gave {hero} some {food} and a {color} blanket.",
        "[They talked all night|While the storm roared, they told stories|The storm lasted until morning, but nobody "
        'minded]. {hero} noticed that {friend} [looked sad|sighed often|kept looking at an empty shelf]. ["Why are '
        'you sad?" asked {hero}.|"What is wrong?" {he} asked.] "My {obj} was stolen last year," said {friend}, "and I '
        'miss it."',
        "[The next day|Some days later], {hero} [came back with|brought] a new {obj}, [made with {his} own "
        'hands|wrapped in paper|just like the old one]. ["This is for you," said {hero}.|"You shared your fire with '
        'me," {hero} said. "Now I share this with you."] {friend} [did not know what to say|laughed and cried at the '
        "same time|put the {noun} on the shelf].",
    ),
    (
        ("What did {friend} miss?", "a {obj}", "{friend} missed {fhis} {obj}."),
        ("What did {hero} eat?", "{food}", "{hero} ate {food}."),
        ("Where did {hero} see a light?", "{in_place2}", "{hero} saw a light {in_place2}."),
        ("Who opened the door?", "{friend}", "{friend} the {fkind} opened the door."),
        ("What did {hero} bring to {friend}?", "a {obj}", "{hero} brought {friend} a new {obj}."),
    ),
)

PLOTS: Final = (LOST, RESCUE, BUILD, FEAR, JOURNEY, QUARREL, MYSTERY, GIFT, CONTEST, SHELTER)

# Every opening states the hero's name, kind, trait and home.
OPENINGS: Final = (
    "Once upon a time, there was a {trait} {kind} named {hero}. {He} lived {home}.",
    "Once upon a time, there was a {trait} {kind} called {hero} who lived {home}.",
    "Once upon a time, a {trait} {kind} named {hero} lived {home}.",
    "Once upon a time, in a land far away, there lived a {trait} {kind}. {His} name was {hero}, and {he} lived {home}.",
    "[Long ago|Many years ago|A long time ago|Not so long ago|Once|One {time}], a {trait} {kind} [named|called] {hero} "
    "lived {home}.",
    "There [once was|was once|was] a {trait} {kind} [named|called] {hero}. {He} lived {home}.",
    "There [was once|once lived|was] a {kind} [named|called] {hero}, who lived {home}. {He} was a {trait} {kind}.",
    "{hero} was a {trait} {kind}[ who lived {home}|, and {he} lived {home}].",
    "{hero} the {kind} lived {home}. [Everyone said that {he} was|{He} was] a {trait} {kind}.",
    "{hero}, a {trait} {kind}, lived {home}.",
    "A {trait} {kind} [named|called] {hero} [once |]lived {home}.",
    "A {kind} [once |]lived {home}. {His} name was {hero}, and {he} was [|known as ]a {trait} {kind}.",
    "The {trait} {kind} {hero} lived {home}.",
    "The {kind} [was called {hero}|had a name: {hero}], and {he} lived {home}. {He} was a {trait} {kind}.",
    "The {kind} {hero} lived {home}. [Everyone said that {he} was|{He} was] a {trait} {kind}.",
    "{in_place}, [people tell the story of|everyone knew|you may hear about] {hero}, a {trait} {kind} who "
    "lived {home}.",
    "[{in_place}|In the [forest|city|mountains|north|old days|beginning|summer|winter|{time}]], there was a {trait} "
    "{kind} [named|called] {hero}, who lived {home}.",
    "[Deep in|Near|Behind] the [forest|{place}], there was a {trait} {kind} [named|called] {hero}, who lived {home}.",
    "This is the story of {hero}, a {trait} {kind} who lived {home}.",
    "[Let me tell you about|Here is a story about|I know a story about|Listen to the story of|We all know] {hero}, a "
    "{trait} {kind} who lived {home}.",
    '"[Hello|Good morning|Good evening|Hi|Hey]!" said {hero}[ the {kind}|]. {He} was a {trait} {kind} who lived '
    "{home}.",
    "Hello[!|, my friend.|, everyone.|, dear reader.| there!] [This is|Here is|Let me tell you|Listen to] the story of "
    "{hero}, a {trait} {kind} who lived {home}.",
    "[Do you know|Have you heard of] {hero}? {He} was a {trait} {kind}, and {he} lived {home}.",
    "[Everyone|Nobody] {in_place} knew {hero}, a {trait} {kind} who lived {home}.",
    "Far away, {home}, lived a {trait} {kind}. {His} name was {hero}.",
    "In the days when {count} kings ruled the land, a {trait} {kind} named {hero} lived {home}.",
    "{home}, there lived a {trait} {kind}. [Everybody called {him} {hero}|{His} name was {hero}].",
    "My {family} once told me about {hero}, a {trait} {kind} who lived {home}.",
)

HABITS: Final = (
    "[Every {time}|Each day], {he} [liked to sing while {he} worked|went for a walk|swept the floor and looked out of "
    "the window|fed the birds].",
    "{He} [had many books but few visitors|knew every path in the land|could whistle better than anyone|never went to "
    "bed without a story].",
    "[Nothing made {him} happier than|{He} loved] [{food}|the smell of rain|the sound of the wind|a good joke].",
    "[The neighbors liked {him}|Everyone knew {him}], because {he} was always [ready to help|full of ideas|good to "
    "others].",
)

WEATHERS: Final = (
    "{weather_line}.",
    "{weather_line}, and {hero} [was up early|looked at the sky|could not sit still|put on {his} coat|had nothing to "
    "do].",
    "[One day|That {time}], the weather was {weather}.",
    "{hero} [looked out of the window|opened the door|woke up] and saw that the weather was {weather}.",
)

# Every ending states how the hero feels.
ENDINGS: Final = (
    "{hero} [felt|was] {feeling}, and {friend} [was too|smiled].",
    "[That night|When the moon rose|In the evening], {hero} [went to bed|fell asleep|looked at the stars] and felt "
    "{feeling}.",
    "And {hero}? {He} was {feeling} [for the rest of the day|for many days|all week long].",
    "{hero} had never been so {feeling}.",
    "[They went home together|The two walked home slowly], and {hero} felt very {feeling}.",
)
CLOSINGS: Final = (
    "[The end.|And they lived happily ever after.|And that is the end of the story.]",
    "[From that day on|Since then], {hero} and {friend} have been friends.",
    "[If you ever come {to_place}|If you go {to_place} today], you may see them [there|laughing together].",
    "{hero} learned that [a friend is the best treasure|kindness always comes back|it is good to ask for help|sharing "
    "makes everything better|you are braver than you think].",
    "",
    "",
)
