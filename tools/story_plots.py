"""Tables of sentence templates for the demo model's stories: openings, plots and endings.

A plot is a list of paragraphs, a paragraph a list of beats, a beat a tuple of alternatives of which one is told; the empty
alternative skips the beat. Slots are filled by ``story_grammar``: ``{hero} {he} {him} {his}`` for the main character,
``{ally} {ahe} {ahim} {ahis} {says}`` for the helper, ``{place.at}`` and its like for where it happens, ``{p[0]}`` and on for
the plot's own row in ``story_world``. A capital first letter of a slot capitalises what fills it.
"""

# ruff: noqa: E501 -- a template stays on one line

from __future__ import annotations

Beat = tuple[str, ...]
Plot = list[list[Beat]]

# Openings that set a scene: the plot then begins with "One day".
SCENES: dict[str, Beat] = {
    "upon": (
        "Once upon a time, there was {a_hero} who lived {place.at}.",
        "Once upon a time, there was {a_hero}.",
        "Once upon a time, {place.at}, there lived {a_hero}.",
        "Once upon a time, {a_hero} lived {place.afar}.",
    ),
    "there": (
        "There was once {a_hero} who lived {place.at}.",
        "There was {a_hero} who lived {place.afar}.",
        "There once was {a_hero}, and everyone {place.at} knew {him}.",
        "There lived {a_hero} {place.at}.",
    ),
    "place": (
        "{Place.at}, there lived {a_hero}.",
        "{Place.afar}, there lived {a_hero}.",
        "{Place.afar} lived {a_hero}.",
        "{Place.at}, everyone knew {hero}, the {adj} {kind}.",
    ),
    "little": (
        "A little {kind}{named} lived {place.at}.",
        "A little {kind}{named} lived {place.afar}.",
        "A {adj} {kind}{named} lived {place.at}.",
        "A {adj} little {kind}{named} lived {place.afar}.",
    ),
    "name": (
        "{Hero} was a {adj} {kind} who lived {place.at}.",
        "{Hero} lived {place.at}.",
        "{Hero} lived {place.afar} and was very {adj}.",
        "{Hero} was the most {adj} {kind} {place.at}.",
    ),
    "the": (
        "The {kind} was {adj} and {adj2}.",
        "The {kind} lived {place.at}.",
        "The {adj} {kind} lived {place.afar}.",
        "The {adj} {kind}{named} was known to everyone {place.at}.",
    ),
    "ago": (
        "Long ago, there was {a_hero} who lived {place.at}.",
        "Long, long ago, {a_hero} lived {place.afar}.",
        "Many years ago, {a_hero} lived {place.at}.",
        "A long time ago, {a_hero} came {place.to} and stayed.",
    ),
    "habit": (
        "Every {time}, {hero} went {place.to}.",
        "Every {season}, {a_hero} came {place.to}.",
        "Every day, {hero} liked to {pastime}.",
        "Nobody {place.at} was as {adj} as {hero}.",
    ),
    "tell": (
        "This is the story of {a_hero}.",
        "Do you know {hero}, the {adj} {kind} who lives {place.at}?",
        "Have you heard about {hero}, the {adj} {kind}?",
        "Listen to the story of {a_hero}.",
    ),
}

# Openings that start at once: the plot then begins with "Soon" or "That day".
STARTS: dict[str, Beat] = {
    "day": (
        "One day, {a_hero} went {place.to}.",
        "One day, {hero} was {place.at}.",
        "One {weather} day, {a_hero} went for a walk {place.at}.",
        "One day, {hero} woke up and felt very {adj}.",
    ),
    "morning": (
        "One {weather} morning, {hero} woke up early.",
        "One {weather} {time}, {a_hero} was {place.at}.",
        "On a {weather} {time}, {hero} walked {place.to}.",
        "Early in the morning, {hero} ran {place.to}.",
    ),
    "weather": (
        "It was a {weather} {time}, and {hero} was {place.at}.",
        "It was a {weather} day {place.at}.",
        "The sun was shining, and {hero} was {place.at}.",
        "It was {season}, and {hero} wanted to {pastime}.",
    ),
    "when": (
        "When the sun came up, {hero} was already {place.at}.",
        "When {hero} woke up, it was a {weather} {time}.",
        "Last {season}, {a_hero} went {place.to}.",
        "When {season} came, {hero} went {place.to}.",
    ),
    "speech": (
        '"What a {weather} {time}!" said {hero}.',
        '"Today I want to {pastime}," said {hero}.',
        '"Good morning!" said {hero}, the {adj} {kind}.',
        '"Where is everyone?" asked {hero}.',
    ),
}

# A sentence or two about the main character, after a scene.
TRAITS: Beat = (
    "{He} liked to {pastime}.",
    "{He} loved to {pastime}.",
    "{He} was {adj}, but {he} was also a little {adj2}.",
    "{He} was always {adj2}, and {he} liked to {pastime}.",
    "All day long, {he} liked to {pastime}.",
    "Most of all, {he} loved to {pastime}.",
    "",
)

ONE_DAY: Beat = (
    "One day",
    "One {weather} day",
    "One {weather} {time}",
    "One morning",
    "Then, one {weather} {time}",
)
SOON: Beat = ("Soon", "That day", "After a while", "Before long", "A little later")

MEETINGS: Beat = (
    "Just then, {an_ally} came by.",
    "Then {he} met {an_ally}.",
    "Not far away, {an_ally} was watching.",
    "On the way, {he} met {an_ally}.",
    "{An_ally} heard it and came closer.",
)

ASKS: Beat = (
    '"What is wrong?" {says} {ally}.',
    '"Why do you look so sad?" {says} {ally}.',
    '"Can I help you?" {says} {ally}.',
    '"Why are you alone?" {says} {ally}.',
)

THANKS: Beat = (
    '"Thank you, {ally_voc}!" said {hero}.',
    '"You are a true friend," said {hero}.',
    '"I will never forget this," said {hero}.',
    "{Hero} hugged {ally} and smiled.",
)

PLOTS: dict[str, Plot] = {
    "skill": [
        [
            (
                "{When}, {hero} saw that all the others could {p[0]}.",
                "{When}, {hero} wanted to learn to {p[0]}.",
                '{When}, {hero} said, "I wish I could {p[0]}."',
            ),
            ("So {he} {p[1]}.", "First, {he} {p[1]}.", "{He} did not wait and {p[1]}."),
            ("But {p[2]}.", "Oh no, {p[2]}!", "Sadly, {p[2]}."),
            (
                "{He} felt silly.",
                '"I will never learn it," {he} said.',
                "{He} tried again, but it was no use.",
                "",
            ),
        ],
        [
            MEETINGS,
            (
                '"I can teach you," {says} {ally}. "{p[3]}"',
                '"Do not give up," {says} {ally}. "{p[3]}"',
                '"I had to learn it too," {says} {ally}. "{p[3]}"',
            ),
            (
                "They practised every day for a week.",
                "{Hero} listened and tried once more.",
                "{Hero} nodded and began again, this time with patience.",
            ),
        ],
        [
            (
                "At last, {hero} {p[4]}.",
                "And then it happened: {hero} {p[4]}.",
                "On the seventh day, {hero} {p[4]}.",
            ),
            (
                "{Ally} clapped and cheered.",
                "Everyone {place.at} came to see it.",
                '"I did it!" {he} shouted.',
                "",
            ),
            (
                "From then on, {he} helped others who wanted to {p[0]}.",
                "Now {he} knew that good things need time.",
                "That night, {he} was too happy to sleep.",
            ),
        ],
    ],
    "lose": [
        [
            (
                "{Hero} had a {p[0]}.",
                "{Hero} never went anywhere without {his} {p[0]}.",
                "More than anything, {hero} loved {his} {p[0]}.",
            ),
            ("{p[2]}", "{p[2]}", ""),
            (
                "But {when}, the {p[1]} was gone.",
                "{When}, {he} looked around, and the {p[1]} was not there.",
                "{When}, {he} fell asleep, and when {he} woke up, the {p[1]} was missing.",
            ),
        ],
        [
            (
                "{He} looked {spot}, but it was not there.",
                "{He} searched everywhere {place.at}.",
                "First {he} looked {spot}. Then {he} looked at home.",
            ),
            (
                '"Where is my {p[1]}?" {he} cried.',
                "A big tear rolled down {his} cheek.",
                "{He} sat down and did not know what to do.",
                "",
            ),
            MEETINGS,
            (
                '"I saw a {p[1]} this morning," {says} {ally}. "Look {spot2}!"',
                '"Let us look together," {says} {ally}. "Four eyes see more than two."',
                '"Think of the last place where you played," {says} {ally}.',
            ),
        ],
        [
            (
                "They went back, and there was the {p[1]}, {spot2}.",
                "And really, the {p[1]} was {spot2}.",
                "{Hero} looked {spot2} and found the {p[1]} at last.",
            ),
            THANKS,
            (
                "From that day on, {he} took good care of {his} {p[1]}.",
                "They shared some cake and laughed about it.",
                "{Hero} still had the {p[1]}, and now {he} had a friend too.",
            ),
        ],
    ],
    "make": [
        [
            (
                "{When}, {hero} wanted to {p[0]} a {p[1]}.",
                '{When}, {hero} had an idea. "I will {p[0]} a {p[1]}!" {he} said.',
                "{When}, {hero} decided to {p[0]} a {p[1]} for all {his} friends.",
            ),
            (
                "{He} had {p[2]}, but {he} had no {need}.",
                "{He} found {p[2]}. Only the {need} was missing.",
                "{He} gathered {p[2]} and then saw that there was no {need}.",
            ),
            (
                '"Without it I cannot start," {he} said.',
                "{He} looked in every corner of the house.",
                "",
            ),
        ],
        [
            (
                "So {he} went to {an_ally}.",
                "{He} asked {an_ally} for help.",
                "Then {he} met {an_ally}.",
            ),
            (
                '"I have enough for both of us," {says} {ally}. "But may I help you?"',
                '"You can have mine," {says} {ally}, "if I may have a part of it."',
                '"I know where to find that," {says} {ally}. "Come with me!"',
            ),
            (
                '"Of course!" said {hero}.',
                "{Hero} agreed at once.",
                '"We will do it together," said {hero}.',
            ),
            (
                "They worked until the evening.",
                "They worked hard and sang a song.",
                "One of them held it and the other one did the rest.",
                "",
            ),
        ],
        [
            (
                "At last, the {p[1]} was ready.",
                "When the {p[1]} was done, they looked at it proudly.",
                "In the end, it was the best {p[1]} {place.at}.",
            ),
            ("{p[4]}",),
            (
                '"It is better because we made it together," {says} {ally}.',
                "Everyone wanted to have one just like it.",
                "{Hero} gave the first turn to {ally}, because friends come first.",
            ),
        ],
    ],
    "fear": [
        [
            (
                "But {hero} had a secret: {he} was afraid of {p[0]}.",
                "{Hero} was afraid of {p[0]}.",
                "There was only one thing that {hero} did not like: {p[0]}.",
            ),
            (
                "{When}, {p[1]}.",
                "{When}, it happened: {p[1]}.",
                "{When}, {he} was alone, and {p[1]}.",
            ),
            (
                "{His} knees began to shake.",
                "{He} hid {spot} and closed {his} eyes.",
                "{He} wanted to run away, but {he} could not move.",
            ),
        ],
        [
            MEETINGS,
            ASKS,
            (
                '"I am scared," said {hero}.',
                '"I am afraid of {p[0]}," {hero} whispered.',
                "{Hero} told {ahim} everything.",
            ),
            (
                '"Everyone is afraid of something," {says} {ally}. "I will stay with you."',
                '"Being brave means to be afraid and still go on," {says} {ally}.',
                '"Take my hand," {says} {ally}. "We will look at it together."',
            ),
        ],
        [
            (
                "So {hero} {p[2]}.",
                "{Hero} took a deep breath. Then {he} {p[2]}.",
                "Slowly, {hero} {p[2]}.",
            ),
            (
                "It was not so bad at all.",
                "The fear became smaller and smaller.",
                "{His} heart grew calm.",
                "",
            ),
            (
                "After that, {he} was never so afraid of {p[0]} again.",
                '"Look, I am brave!" {he} said, and {ally} smiled.',
                "That evening, {he} told everyone about it, and {he} was proud.",
            ),
        ],
    ],
    "find": [
        [
            (
                "{When}, {hero} found a {p[0]} {spot}.",
                "{When}, something strange lay {spot}. It was a {p[0]}.",
                "{When}, {he} saw a {p[0]} {spot}.",
            ),
            (
                '"Who does it belong to?" {he} asked.',
                '"What can this be?" {hero} wondered.',
                "{He} picked it up and turned it around.",
                "",
            ),
        ],
        [
            (
                "{He} showed it to {an_ally}.",
                "{He} took it to {an_ally}.",
                "{An_ally} came to look at it.",
            ),
            (
                '"That is very old," {says} {ally}. "Be careful with it."',
                '"I have waited a long time for someone to find it," {says} {ally}.',
                '"Only a {adj} {kind} can find out what it does," {says} {ally}.',
            ),
            (
                "So {hero} {p[1]}.",
                "That night, {hero} {p[1]}.",
                "Together they sat down, and {hero} {p[1]}.",
            ),
        ],
        [
            (
                "And then {p[2]}.",
                "Nobody could believe it: {p[2]}!",
                "At first nothing happened. Then {p[2]}.",
            ),
            (
                '"How wonderful!" {says} {ally}.',
                "{Hero} laughed with joy.",
                "{Hero} held {his} breath.",
                "",
            ),
            (
                "They kept the secret and came back every day.",
                "From that day on, {hero} looked at small things more closely.",
                "{Hero} shared it with everyone, and nobody was ever bored again.",
            ),
        ],
    ],
    "rescue": [
        [
            (
                "{When}, {hero} heard a small cry.",
                '{When}, somebody called, "Help! Help!"',
                "{When}, {hero} heard a strange sound and stopped.",
            ),
            (
                "It was a {p[0]}, {p[1]}.",
                "{He} ran to look and found a {p[0]}, {p[1]}.",
                "There was a {p[0]}, {p[1]}.",
            ),
            (
                '"Do not be afraid," said {hero}. "I will help you."',
                "{Hero} pulled and pulled, but it did not work.",
                "The {p[0]} was very tired and could hardly speak.",
            ),
        ],
        [
            (
                "{Hero} called {an_ally}.",
                "Luckily, {an_ally} was near.",
                "{Hero} could not do it alone, so {he} asked {an_ally}.",
            ),
            (
                '"We must be quick," {says} {ally}.',
                '"Stay calm," {says} {ally}. "I have an idea."',
                '"You are the only one who can do it," {says} {ally}. "I will hold you."',
            ),
            (
                "So {hero} {p[2]}.",
                "Very carefully, {hero} {p[2]}.",
                "With {his} friend at {his} side, {hero} {p[2]}.",
            ),
        ],
        [
            (
                "At last, the {p[0]} was safe.",
                "The {p[0]} was free!",
                "Soon the {p[0]} was safe and warm.",
            ),
            (
                '"You saved my life," said the {p[0]}.',
                "The {p[0]} could not stop saying thank you.",
                "",
            ),
            (
                "Years later, the {p[0]} still came to visit {hero}.",
                "From then on, the three of them were best friends.",
                "Everyone {place.at} said that {hero} was a hero, but {he} only smiled.",
            ),
        ],
    ],
    "storm": [
        [
            (
                "{When}, {hero} was far from home when {p[0]}.",
                "{When}, {hero} wanted to go home, but {p[0]}.",
                "{When}, {p[0]}.",
            ),
            (
                "{He} could not find the way.",
                "{He} was cold and tired.",
                '"I want to go home," {he} said.',
            ),
            (
                "{He} called, but nobody answered.",
                "{He} walked in a circle and came back to the same stone.",
                "",
            ),
        ],
        [
            (
                "Then {he} saw a small light. It was {an_ally} with a lamp.",
                "Suddenly, {an_ally} stood in front of {him}.",
                "Then {he} heard steps. It was {an_ally}.",
            ),
            (
                '"Come with me," {says} {ally}. "I know {shelter}."',
                '"You cannot stay here," {says} {ally}. "There is {shelter}."',
                '"Follow me to {shelter}," {says} {ally}.',
            ),
            (
                "They sat close together and shared a piece of bread.",
                "Inside, they told each other stories until the storm was over.",
                "It was warm there, and {hero} fell asleep.",
            ),
        ],
        [
            (
                "In the morning, the sky was clear.",
                "When they woke up, the sun was shining.",
                "At last, the storm went away.",
            ),
            (
                "{Ally} showed {him} the way home.",
                "They walked home together.",
                "{Hero} could see {his} home from the hill.",
            ),
            (
                "Since then, {hero} has put a lamp in the window on every stormy night.",
                "{Hero} never forgot {ally} and often brought {ahim} a warm pie.",
                "{Hero} was glad to be home, and even more glad to have a new friend.",
            ),
        ],
    ],
    "grow": [
        [
            (
                "{When}, {hero} got a {p[0]}.",
                "{When}, {hero} found a {p[0]} in an old pocket.",
                "{When}, {hero} bought a {p[0]} for one coin.",
            ),
            (
                "{He} planted it and gave it water.",
                "{He} dug a hole and put it in the soft earth.",
                "{He} planted it in the best spot and waited.",
            ),
            (
                "Day after day, nothing happened.",
                "{He} looked every hour, but there was only brown earth.",
                "A week went by, and there was nothing to see.",
            ),
        ],
        [
            (
                '"It will never grow," {he} told {an_ally}.',
                "{He} wanted to give up, but {an_ally} stopped {him}.",
                "{An_ally} saw {him} sitting there.",
            ),
            (
                '"Roots grow first," {says} {ally}. "You cannot see them."',
                '"Sing to it and be patient," {says} {ally}.',
                '"Give it a little more time," {says} {ally}.',
            ),
            (
                "So {hero} watered it every day.",
                "{Hero} waited, and {he} talked to it every evening.",
                "So {hero} waited through the rain and the sun.",
            ),
        ],
        [
            (
                "Then a green leaf came out of the ground.",
                "One morning, there was a tiny green leaf.",
                "And then, after the rain, it began to grow.",
            ),
            (
                "In the end, the {p[1]} was {p[2]}.",
                "It grew and grew until the {p[1]} was {p[2]}.",
                "By the end of {season}, the {p[1]} was {p[2]}.",
            ),
            (
                "{Hero} shared it with everyone {place.at}.",
                "{Hero} gave new seeds to all {his} friends.",
                '"You were right," {hero} said to {ally}, and they danced around it.',
            ),
        ],
    ],
    "honest": [
        [
            (
                "{When}, {hero} {p[0]}.",
                "{When}, nobody was looking, and {hero} {p[0]}.",
                "{When}, {hero} was careless and {p[0]}.",
            ),
            (
                '"Nobody has to know," {he} thought.',
                "{He} ran away and hid {spot}.",
                "{He} did not tell anyone.",
            ),
            (
                "But {his} stomach felt strange, and {he} could not play.",
                "That night, {he} could not sleep.",
                "But {he} felt heavy, as if {he} had a stone in {his} pocket.",
            ),
        ],
        [
            (
                'The next day, {an_ally} asked, "Who did that to {p[1]}?"',
                "In the morning, {an_ally} was looking sadly at {p[1]}.",
                '"Have you seen what happened to {p[1]}?" asked {an_ally}.',
            ),
            (
                '"It was me," said {hero}. "I am sorry."',
                "{Hero} looked at the ground and told the truth.",
                "{Hero} swallowed and told {ahim} everything.",
            ),
            (
                '"Thank you for being honest," {says} {ally}. "That was not easy."',
                '"I am not angry," {says} {ally}. "Everyone makes mistakes."',
                '"The truth is worth more than {p[1]}," {says} {ally}.',
            ),
        ],
        [
            (
                "{Hero} helped {ally} all day to make it good again.",
                "Together they put everything right.",
                "{Hero} worked for three days to pay for it.",
            ),
            (
                "{His} heart felt light again.",
                "After that, {he} slept very well.",
                "The stone in {his} pocket was gone.",
                "",
            ),
            (
                "From then on, {hero} always told the truth.",
                "{Hero} learned that the truth is the shortest way.",
                "And the two of them became good friends.",
            ),
        ],
    ],
    "share": [
        [
            (
                "{When}, {hero} and {an_ally} both wanted {p[0]}.",
                "{When}, {hero} met {an_ally}. They both looked at {p[0]}.",
                "{When}, {hero} had {p[0]}, and {an_ally} wanted it too.",
            ),
            (
                '"It is mine!" said {hero}.',
                '"I saw it first!" said {hero}.',
                "{Hero} held it tight and would not let go.",
            ),
            (
                '"That is not fair," {says} {ally}.',
                '"No, it is mine," {says} {ally}.',
                "{Ally} began to cry.",
            ),
        ],
        [
            (
                "They pulled and shouted until both of them fell down.",
                "They were so angry that they did not speak for a whole day.",
                "They turned their backs and went home.",
            ),
            (
                "{Hero} was alone with {p[0]}, and it was no fun.",
                "But it was boring to be alone.",
                "After an hour, {hero} began to feel sorry.",
            ),
            (
                '"I am sorry," said {hero}. "Let us share."',
                '{Hero} went to {ally} and said, "You can have half of it."',
                '"You first," said {hero} at last. "Then it is my turn."',
            ),
        ],
        [
            (
                '"I am sorry too," {says} {ally}.',
                "{Ally} smiled and nodded.",
                "{Ally} jumped for joy.",
            ),
            (
                "They laughed and forgot the quarrel.",
                "Together they had more fun than ever before.",
                "They sat side by side until the sun went down.",
            ),
            (
                "And they both knew that sharing makes things bigger.",
                "After that day, {hero} and {ally} shared everything.",
                "It was the beginning of a long friendship.",
            ),
        ],
    ],
    "visitor": [
        [
            (
                "{When}, {p[0]} {p[1]}.",
                "{When}, {hero} heard a loud noise. There was {p[0]}! It {p[1]}.",
                "{When}, {hero} could not believe it: {p[0]} {p[1]}.",
            ),
            (
                '"Who are you?" asked {hero}.',
                '"Are you hurt?" asked {hero}.',
                "{Hero} came closer, step by step.",
            ),
            (
                "It was far from home, and it {p[2]}.",
                '"I am lost," it said quietly, because it {p[2]}.',
                "It shook and glowed, and it {p[2]}.",
            ),
        ],
        [
            (
                "{Hero} asked {an_ally} what to do.",
                "{Hero} hid it in a basket and took it to {an_ally}.",
                "Soon, {an_ally} came to see it.",
            ),
            (
                '"It must go home before the morning," {says} {ally}.',
                '"We have to help it," {says} {ally}. "I know how."',
                '"I have never seen anything so lovely," {says} {ally}.',
            ),
            (
                "All night long they worked. They {p[3]}.",
                "So they {p[3]}.",
                "They thought for a long time. Then they {p[3]}.",
            ),
        ],
        [
            (
                "It flew up and up, until it was only a point of light.",
                "With a whoosh, it was gone.",
                "Slowly, it rose into the sky.",
            ),
            ('"Goodbye!" called {hero}.', "{Hero} waved for a long time.", ""),
            (
                "Every night, a light blinks {place.at}, and {hero} knows who it is.",
                "{Hero} was sad and happy at the same time.",
                "Sometimes it sends {hero} a letter, written in silver.",
            ),
        ],
    ],
    "race": [
        [
            (
                '{When}, {an_ally} said, "I am faster than you!"',
                "{When}, {hero} and {an_ally} wanted to know who was faster.",
                "{When}, there was a big race {place.at}, and {an_ally} wanted to win it.",
            ),
            (
                '"Let us race to the old tree," said {hero}.',
                '"We will see," said {hero}.',
                "{Hero} was nervous, but {he} did not say no.",
            ),
            (
                "One, two, three, and off they went!",
                "They started when the bell rang.",
                "Everyone came to watch.",
            ),
        ],
        [
            (
                "At first, {ally} was far ahead.",
                "{Hero} ran as well as {he} could.",
                "Halfway there, {ally} looked back and laughed.",
            ),
            (
                "But then {ally} tripped over a root and hurt {ahis} foot.",
                "But {ally} stopped to rest and fell asleep.",
                "Then {ally} slipped and fell into a ditch.",
            ),
            (
                '{Hero} could have won, but {he} stopped. "Are you all right?" {he} asked.',
                "{Hero} saw it and went back to help.",
                "{Hero} did not run on. {He} sat down next to {ahim}.",
            ),
        ],
        [
            (
                "They crossed the line together, arm in arm.",
                "They went to the end side by side, and everyone cheered.",
                "Nobody won the race that day.",
            ),
            (
                '"You are not only quick, you are kind," {says} {ally}.',
                '"You won something better," {says} {ally}.',
                "The prize was a big cake, and they cut it in two.",
            ),
            (
                "They raced again many times, but only for fun.",
                "From then on, they trained together.",
                "",
            ),
        ],
    ],
    "party": [
        [
            (
                "{When}, it was {hero_s} birthday.",
                '{When}, {hero} woke up and thought, "It is my birthday!"',
                "{When}, {hero} put on {his} best clothes, because it was {his} birthday.",
            ),
            (
                "But nobody said a word about it.",
                "{He} waited and waited, but nobody came.",
                "All {his} friends were busy and walked past.",
            ),
            (
                '"They have forgotten me," {he} said.',
                "{He} went away to be alone {spot}.",
                "{He} felt a lump in {his} throat.",
            ),
        ],
        [
            (
                "In the evening, {an_ally} knocked on the door.",
                "Then {an_ally} came running.",
                "Just when {he} wanted to go to bed, {an_ally} called {him}.",
            ),
            (
                '"I need your help," {says} {ally}. "Come quickly!"',
                '"Close your eyes and follow me," {says} {ally}.',
                '"There is something you must see," {says} {ally}.',
            ),
            (
                "{Hero} followed {ahim} through the dark.",
                "They walked past the trees until they saw a hundred lights.",
                "{Hero} wondered what it could be.",
            ),
        ],
        [
            (
                '"Surprise!" everyone shouted.',
                "All {his} friends were there, with lamps and flowers.",
                "There was a long table with a huge cake on it.",
            ),
            (
                "They danced until midnight.",
                "There was music, and there were games.",
                "{Hero} laughed and cried at the same time.",
            ),
            (
                "It was the best birthday of {his} life.",
                '"I thought that I was alone," {he} said, "but I never was."',
                "{Hero} made a wish, but {he} had everything already.",
            ),
        ],
    ],
    "night": [
        [
            (
                "{When}, {hero} could not sleep.",
                "{When}, {hero} lay awake and looked at the ceiling.",
                "{When}, everyone was asleep, but not {hero}.",
            ),
            (
                "{He} turned to the left and to the right.",
                "{He} counted sheep, but the sheep ran away.",
                "{He} drank warm milk, but it did not help.",
            ),
            (
                "So {he} got up and went outside.",
                "In the end, {he} went out into the moonlight.",
                "{He} opened the door and went {place.to}.",
            ),
        ],
        [
            (
                "There {he} met {an_ally}, who was awake too.",
                "{An_ally} was sitting under the moon.",
                "Outside, {he} found {an_ally}, looking at the stars.",
            ),
            ASKS,
            (
                '"My head is too full," said {hero}.',
                '"I think of tomorrow," said {hero}.',
                '"It is too quiet," said {hero}.',
            ),
            (
                '"Then tell me about it," {says} {ally}, "and your head will be empty."',
                '"Listen to the wind," {says} {ally}. "It has a song for you."',
                '"Let us give every star a name," {says} {ally}.',
            ),
        ],
        [
            (
                "They sat there for a long time.",
                "They talked until the moon was low.",
                "Soon, {hero} began to yawn.",
            ),
            (
                "{His} eyes grew heavy, and {he} fell asleep on the grass.",
                "{Ally} put a blanket over {him}.",
                "{Hero} went back to bed and slept until noon.",
            ),
            (
                "Since that night, {hero} has never been afraid of being awake.",
                "In {his} dream, {he} flew over the quiet land.",
                "And the moon watched over both of them.",
            ),
        ],
    ],
}

ENDINGS: Beat = (
    "",
    "",
    "",
    "And they lived happily ever after.",
    "It was a very good day.",
    "The end.",
    "And if you go {place.to}, you may still see them there.",
    "{Hero} went home with a smile.",
)
