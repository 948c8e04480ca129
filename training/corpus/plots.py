"""The plots: what goes wrong, who helps, how it ends. Each act is a template of grammar.py.

A plot's questions are pairs of (question, short answer, full answer) about facts that its text always
states. `{he}` is always the hero; the friend is named, or `{fhe}` right after being named.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """One kind of story. `acts` follow the opening; `problem` is a short phrase for extractions."""

    name: str
    problem: str
    acts: tuple[str, ...]
    questions: tuple[tuple[str, str, str], ...]


MEET = (
    "[Just then|At that moment|A little later|Soon], [a {ftrait} {fkind} named {friend} came along|{hero} met "
    "{friend}, a {ftrait} {fkind}|a {ftrait} {fkind} called {friend} appeared]."
)
ASK = (
    '["What is the matter?" asked {friend}.|"Why do you look so sad?" {friend} asked.|"Can I help you, {hero}?" asked '
    '{friend}.|{friend} sat down next to {hero}. "Tell me what happened," {fhe} said.]'
)

LOST = Plot(
    "lost",
    "lost the {noun}",
    (
        "{hero} had a {obj}, [and {he} took it everywhere|which was a gift from {his} {family}|and {he} loved it more "
        "than anything]. [One {time}|But one {time}], {he} [reached into {his} bag|looked around|woke from a nap] and "
        'the {noun} was gone. ["Oh no!" cried {hero}. "I have lost my {noun}!"|{hero} felt a cold little stone in '
        '{his} stomach. "Where is my {noun}?" {he} whispered.|{hero} was so sad that {he} could not even eat.]',
        "{hero} looked {wrong_hiding}, but [there was nothing there|there was only dust|the {noun} was not there]. "
        + MEET
        + " "
        + ASK
        + ' ["I have lost my {obj}," said {hero}.|"My {obj} is gone," {hero} answered.|"I cannot find my {obj}," said '
        '{hero}, and {he} wiped {his} eyes.] ["Then we will look together," said {friend}.|"Two can see more than '
        'one," said {friend}.|"Do not worry," said {friend}. "I am good at finding things."]',
        "They searched [everywhere|{in_place}|for a long time]. [At last|Finally|When they were about to give up], "
        '{friend} looked {hiding}[, and there was the {noun}| and saw something {color}. It was the {noun}]! ["Is '
        'this yours?" asked {friend}.|"Here it is!" called {friend}.|"I found it!" {friend} shouted.] {hero} [hugged '
        "{friend}|jumped for joy|laughed out loud] and held the {noun} tight.",
    ),
    (
        ("What did {hero} lose?", "a {obj}", "{hero} lost a {obj}."),
        ("Where was the {noun}?", "{hiding}", "The {noun} was {hiding}."),
        ("Who found the {noun}?", "{friend}", "{friend} the {fkind} found the {noun}."),
        ("Why was {hero} sad?", "{he} had lost the {noun}", "{hero} was sad because {he} had lost {his} {noun}."),
    ),
)

RESCUE = Plot(
    "rescue",
    "{friend} was stuck",
    (
        "{hero} was [walking|taking a walk|playing] {in_place} with {his} {obj} when {he} heard [a cry for "
        'help|someone call|a small voice]. ["Help! I am stuck!" said the voice.|"Please, can anybody hear me?" called '
        'the voice.|"Help me, please!" someone shouted.]',
        '{hero} [ran|hurried|went] closer and saw a {ftrait} {fkind} {trap}. ["My name is {friend}," said the '
        '{fkind}. "I cannot get out."|"I am {friend}," the {fkind} said. "I have been here since sunrise."] ["Do not '
        'be afraid," said {hero}.|"Stay still," said {hero}. "I will get you out."|"I will help you, {friend}," '
        "{hero} promised.]",
        "First {hero} pulled with both hands, but {friend} did not move. Then {he} [had an idea|looked at the {noun} "
        "and had an idea|thought for a moment]. {hero} [held out the {noun}|used the {noun} to reach {friend}|gave "
        'one end of the {noun} to {friend}] and [pulled as hard as {he} could|counted to three and pulled]. ["One, '
        'two, three!"|Pop!|It was hard work.] At last {friend} was free.',
        '["Thank you, {hero}!" said {friend}. "You saved me."|"How can I ever thank you?" asked {friend}.|"You are a '
        'true friend," said {friend}.] ["It was nothing," said {hero}.|"Anyone would have done the same," said '
        "{hero}.|{hero} smiled and felt warm inside.] [From that day on|After that], {hero} and {friend} were [the "
        "best of friends|always together|never far apart].",
    ),
    (
        ("Where was {friend} stuck?", "{trap}", "{friend} was stuck {trap}."),
        ("Who saved {friend}?", "{hero}", "{hero} the {kind} saved {friend}."),
        ("What did {hero} use to save {friend}?", "the {noun}", "{hero} used the {obj} to save {friend}."),
        ("What did {hero} hear?", "a cry for help", "{hero} heard someone calling for help."),
    ),
)

BUILD = Plot(
    "build",
    "had no {parts}",
    (
        "{hero} wanted to make {project}. [{He} had dreamed about it all winter|{He} drew a plan on a piece of "
        "paper|{He} talked about nothing else]. [But there was one problem|There was only one trouble]: {he} had no "
        "{parts}.",
        "{hero} went to look for {parts} {in_place}. "
        + MEET
        + ' ["What are you looking for?" asked {friend}.|"You look busy," said {friend}. "What are you doing?"] ["I '
        'want to make {project}, but I have no {parts}," said {hero}.|"I need {parts} to make {project}," {hero} '
        "explained.]",
        '[{friend} thought for a while|{friend} scratched {fhis} head|{friend} smiled]. "I have plenty of {parts} at '
        'home," {fhe} said. "I will give them to you for your {obj}." {hero} looked at the {noun}. [It was hard to '
        "give it away|It was {his} favorite thing|{He} had owned it for years], but {he} [nodded|said yes|agreed].",
        "[They worked all day|Together they worked until dark|{hero} and {friend} worked side by side]. [{hero} held "
        "and {friend} pulled|{friend} measured and {hero} cut|They made mistakes and laughed about them]. When "
        '{the_project} was ready, {friend} gave the {noun} back. ["Friends do not need to pay," {fhe} said.|"I do not '
        'want it any more," {fhe} said. "I had more fun helping you."]',
    ),
    (
        ("What did {hero} want to make?", "{project}", "{hero} wanted to make {project}."),
        ("What did {hero} need?", "{parts}", "{hero} needed {parts}."),
        ("What did {hero} give to {friend}?", "the {noun}", "{hero} gave the {obj} to {friend}."),
        ("Who had {parts}?", "{friend}", "{friend} the {fkind} had plenty of {parts}."),
    ),
)

FEAR = Plot(
    "fear",
    "was afraid of {fear}",
    (
        "{hero} had a secret: {he} was afraid of {fear}. [{He} never told anyone|Nobody knew it|{He} was ashamed of "
        "it]. [Every time {he} thought of it, {his} knees shook|When the others played, {he} stayed at home|It made "
        "{him} feel very small].",
        MEET
        + ' ["Come with me to the {place2}," said {friend}.|"Let us go to the {place2}," {friend} said. "It will be '
        'fun."] [{hero} shook {his} head|{hero} looked at the ground|{hero} did not move]. "I cannot. I am afraid '
        'of {fear}," {he} said [at last|quietly|in a small voice].',
        "{friend} did not laugh. [{Fhe} sat down beside {hero}|{Fhe} took {hero} by the hand|{Fhe} was silent for a "
        'moment]. "[I used to be afraid of {fear} too|Everybody is afraid of something]," said {friend}. "Take my '
        '{obj}. [When you hold it, you are not alone|It always makes me brave|Hold it tight and breathe slowly]."',
        "So {hero} took the {noun} and they went {to_place2}. [{His} heart was beating fast|{He} wanted to run away, "
        "but {he} did not|Step by step, it became easier]. [After a while|In the end], {hero} [noticed that {he} was "
        'not afraid any more|began to smile|even started to sing]. "[I did it|Look at me, {friend}]!" {he} '
        "[cried|called|shouted].",
    ),
    (
        ("What was {hero} afraid of?", "{fear}", "{hero} was afraid of {fear}."),
        ("What did {friend} give to {hero}?", "a {obj}", "{friend} gave {hero} a {obj}."),
        ("Where did they go?", "to the {place2}", "They went to the {place2}."),
        ("Who helped {hero}?", "{friend}", "{friend} the {fkind} helped {hero}."),
    ),
)

JOURNEY = Plot(
    "journey",
    "did not know the way",
    (
        '{hero} had a dream: {he} wanted to {dream}. ["One day I will go," {he} always said.|Every night {he} thought '
        "about it before {he} fell asleep.|Everyone said that it was too far.] One {time}, {hero} packed {food} and a "
        "{obj} and [set out|began to walk|left home].",
        "{He} walked [past the {place2}|for {count} days|until {his} feet hurt], but {he} did not know the way. "
        + MEET
        + ' ["Where are you going?" asked {friend}.|"You look lost," said {friend}.] "I want to {dream}," said '
        '{hero}. ["That is a long way," said {friend}. "May I come with you?"|"I know the way," said {friend}. "I '
        'will go with you."]',
        "[They walked side by side|They traveled together] for {count} days. [At night they shared the {food}|When "
        "they were hungry, they ate the {food}] and [told each other stories|sang old songs|looked at the sky]. [When "
        "it was dark, {friend} was never afraid|When {friend} was tired, {hero} told {fhim} a joke|Once they had to "
        "cross a river, and {hero} held {friend} by the hand].",
        "[At last|On the last day|Finally] they arrived, and {hero} could {dream}. [It was even better than {he} had "
        "dreamed|{He} did not say a word for a long time|{His} eyes were full of tears]. {hero} gave the {noun} to "
        '{friend}. ["This is for you," {he} said. "Without you I would still be lost."|"Please keep it," said {hero}. '
        '"You showed me the way."]',
    ),
    (
        ("What did {hero} want to do?", "{dream}", "{hero} wanted to {dream}."),
        ("How long did they walk?", "{count} days", "They walked for {count} days."),
        ("Who went with {hero}?", "{friend}", "{friend} the {fkind} went with {hero}."),
        ("What did {hero} give to {friend}?", "a {obj}", "{hero} gave {friend} a {obj}."),
        ("What did they eat?", "{food}", "They ate the {food}."),
    ),
)

QUARREL = Plot(
    "quarrel",
    "they both wanted the {noun}",
    (
        "{hero} had a friend, a {ftrait} {fkind} named {friend}. [They did everything together|Every day they met "
        "{in_place}|They had known each other for years]. One {time}, they found a {obj} {hiding}.",
        '["I saw it first!" said {hero}.|"It is mine!" cried {hero}.] ["No, I saw it first!" said {friend}.|"No, it '
        'is mine!" cried {friend}.] [They both pulled|They pulled and pulled|Neither of them would let go], and the '
        "{noun} [broke in two|fell into the mud|cracked]. {friend} [went home without a word|ran away in tears|walked "
        "off].",
        "{hero} [sat alone|went to bed early|looked at the {noun}] and felt [terrible|lonely|very sorry]. [The house "
        'was much too quiet|Nothing was fun without {friend}]. "[A {noun} is only a {noun}|I do not need a {noun}], '
        'but {friend} is my friend," {he} thought. So {hero} [repaired|mended|cleaned] the {noun} and [went|walked] '
        "to see {friend}.",
        '"I am sorry, {friend}," said {hero}. "[You can have it|The {noun} is yours]." {friend} shook {fhis} head. '
        '"[I am sorry too|No, I was wrong], {hero}," {fhe} said. "We will share it." So {hero} used the {noun} [on '
        "one day and {friend} on the next|in the morning and {friend} in the evening], and they never quarreled about "
        "it again.",
    ),
    (
        ("What did they find?", "a {obj}", "They found a {obj}."),
        ("Where did they find it?", "{hiding}", "They found it {hiding}."),
        ("Who is {hero}'s friend?", "{friend}", "{hero}'s friend is {friend} the {fkind}."),
        ("Who said sorry first?", "{hero}", "{hero} said sorry first."),
    ),
)

MYSTERY = Plot(
    "mystery",
    "heard {sound}",
    (
        "[Late at night|In the middle of the night|Just after sunset], {hero} heard {sound}. [It came from far "
        "away|It stopped and started again|It made the hair on {his} neck stand up]. {hero} lit a candle, took {his} "
        "{obj} and [went outside|opened the door|followed the sound].",
        '{hero} knocked at the door of {his} neighbor {friend}, a {ftrait} {fkind}. "Did you hear it too?" {he} '
        'asked. ["Yes," said {friend}. "I thought it was a ghost."|"I did," said {friend}, "and I cannot sleep."] '
        '["Let us find out what it is," said {hero}.|"Come with me," said {hero}. "Together we are brave."]',
        "They followed the sound [to the {place}|all the way to the {place}]. [Step by step they came closer|{friend} "
        "held the candle|The candle flickered]. There, {hiding}, sat a {baby}! [It was all alone|It was shaking with "
        'cold|It looked at them with big eyes]. ["So it was you who made that sound," said {hero}.|"You poor little '
        'thing," said {friend}.]',
        "{hero} wrapped the {baby} in a blanket and [gave it some {food}|fed it {food}]. {friend} [sang a song until "
        "it fell asleep|looked after it all night|told it a story]. [In the morning they found its mother|The next "
        "day they brought it back to its mother|When the sun came up, its mother came], and the {baby} was safe.",
    ),
    (
        ("What did {hero} hear?", "{sound}", "{hero} heard {sound}."),
        ("What did they find?", "a {baby}", "They found a {baby}."),
        ("Where was the {baby}?", "{hiding}", "The {baby} was {hiding}."),
        ("Who went with {hero}?", "{friend}", "{friend} the {fkind} went with {hero}."),
        ("What did the {baby} eat?", "{food}", "The {baby} ate {food}."),
    ),
)
