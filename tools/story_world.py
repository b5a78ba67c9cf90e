"""Tables of the demo model's stories: characters, places and what can happen to them.

One row per line, columns split by ``|`` and alternatives by ``;``. The rows tie things together on purpose
(a dragon likes fire, a pond has frogs): a model can then learn that one opening leads to one kind of story and another
opening to another, and even greedy decoding stays varied.
"""

# ruff: noqa: E501 -- a row of a table stays on one line

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Somewhere to live: ``at`` and ``to`` are phrases, ``spots`` are hiding places, ``allies`` are kinds of helper."""

    at: str
    to: str
    afar: str
    spots: tuple[str, ...]
    allies: tuple[str, ...]
    pastimes: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of main character: ``plots`` are ``plot:payload`` keys it is drawn to."""

    noun: str
    genders: str
    names: tuple[str, ...]
    adjectives: tuple[str, ...]
    places: tuple[str, ...]
    plots: tuple[str, ...]


@dataclass(frozen=True)
class Ally:
    """A kind of helper: how it looks and how it speaks."""

    noun: str
    genders: str
    looks: tuple[str, ...]
    says: tuple[str, ...]


def split(cell: str) -> tuple[str, ...]:
    """Alternatives of one cell: ``"a ; b"`` to ``("a", "b")``."""
    return tuple(part.strip() for part in cell.split(";") if part.strip())


def rows(table: str) -> list[list[str]]:
    """Cells of each non-empty line of a table."""
    return [[c.strip() for c in line.split("|")] for line in table.strip().splitlines() if line]


_PLACES = """
forest | in the forest | to the forest | deep in the green forest | under a fern; behind a fallen log; inside a hollow tree | owl; squirrel; badger; deer; woodcutter | climb the tall trees; collect acorns; listen to the birds
garden | in the garden | to the garden | behind a white gate, in a garden full of roses | under a rose bush; behind the watering can; between the cabbages | hedgehog; snail; bee; gardener | smell the roses; watch the bees; dig in the soft soil
meadow | in the meadow | to the meadow | beyond the hills, in a wide meadow | in the tall grass; beside a daisy; under a clover leaf | rabbit; lamb; butterfly; shepherd | chase butterflies; roll in the grass; pick yellow flowers
river | by the river | to the river | where the river bends | between two smooth stones; under the wooden bridge; in the reeds | otter; frog; duck; fisherman | throw pebbles into the water; watch the fish; splash in the shallow water
pond | by the pond | to the pond | beside a quiet pond | on a lily pad; in the mud; under a mossy rock | frog; duck; turtle; heron | hop from stone to stone; feed the ducks; count the lily pads
beach | on the beach | to the beach | where the sea meets the sand | under a pile of seaweed; inside a broken bucket; in a rock pool | crab; seagull; turtle; sailor | build castles of sand; run from the waves; look for shells
mountain | on the mountain | to the mountain | high on a snowy mountain | on a narrow ledge; in a crack in the rock; under the snow | goat; eagle; shepherd; bear | shout and hear the echo; look down at the valley; slide down the snow
castle | in the castle | to the castle | behind the thick walls of a castle | under the throne; behind a heavy curtain; at the top of the tower | cook; knight; queen; mouse | run along the long halls; look out of the tower; listen to the trumpets
village | in the village | to the village | in a small village at the end of a long road | behind the well; under a cart; on a window sill | baker; tailor; postman; cat | talk to everyone; play in the square; ring the old bell
farm | on the farm | to the farm | on a farm with a crooked fence | in a basket of eggs; behind the barn; under a bale of hay | farmer; hen; horse; pig | feed the hens; ride on the cart; jump over the fence
market | at the market | to the market | in a town with a busy market | under a table of apples; inside a basket; behind a barrel | baker; parrot; tailor; grandmother | taste the cheese; look at the bright cloth; listen to the fiddle
cave | in the cave | to the cave | inside a dark cave | behind a tall stone; in a deep crack; at the bottom of a pool | bat; bear; dwarf; spider | count the shiny stones; make funny shadows; listen to the dripping water
island | on the island | to the island | far away, on a tiny island | under a palm tree; inside a big shell; at the edge of the water | parrot; turtle; monkey; sailor | eat sweet coconuts; look for treasure; swim around the rocks
park | in the park | to the park | in a park in the middle of the city | under a bench; beside the fountain; behind the slide | pigeon; puppy; gardener; squirrel | play on the swings; fly kites; run around the fountain
school | at school | to school | in a little red school | under the desk; behind the map; in a box of chalk | teacher; mouse; cook; cat | draw pictures; count to one hundred; ask questions
library | in the library | to the library | in an old library with a thousand books | behind a row of books; under the ladder; between two pages | librarian; mouse; spider; cat | read about faraway lands; look at the maps; whisper to the books
hills | in the snowy hills | to the snowy hills | far away in the snowy hills | under a frozen bush; in a deep drift of snow; behind a block of ice | wolf; hare; reindeer; owl | make snowballs; slide on the ice; watch the snow fall
harbour | at the harbour | to the harbour | at a harbour full of ships | in a coil of rope; under a fishing net; behind a barrel | sailor; seagull; cat; fisherman | watch the ships; learn new knots; wave at the sailors
jungle | in the jungle | to the jungle | in the middle of a hot jungle | behind a waterfall; under a huge leaf; at the foot of a fig tree | monkey; parrot; elephant; tiger | swing on the vines; eat ripe figs; follow the bright birds
desert | in the desert | to the desert | in a golden desert | under a flat rock; beside a cactus; in the hot sand | camel; lizard; merchant; fox | slide down the dunes; draw in the sand; watch the sunset
lighthouse | at the lighthouse | to the lighthouse | in a lighthouse above the sea | on the winding stairs; behind the great lamp; under a loose board | keeper; seagull; cat; crab | polish the great lamp; count the boats; watch the storms
"""

PLACES: dict[str, Place] = {
    r[0]: Place(r[1], r[2], r[3], split(r[4]), split(r[5]), split(r[6])) for r in rows(_PLACES)
}

_KINDS = """
girl | f | Lily | curious; kind | garden; meadow | grow:sunflower; find:seed; make:crown
girl | f | Mia | clever; quiet | library; school | skill:read; find:book; honest:book
girl | f | Anna | brave; cheerful | mountain; village | storm:snow; rescue:lamb; skill:skate
girl | f | Rosie | busy; happy | farm; market | make:pie; rescue:chick; honest:eggs
girl | f | Ella | gentle; shy | castle; park | skill:dance; party:; fear:dark
girl | f | Nora | adventurous; lively | beach; harbour | find:bottle; make:boat; fear:waves
girl | f | Zoe | playful; noisy | park; village | skill:drum; lose:kite; race:
girl | f | Clara | patient; thoughtful | lighthouse; beach | storm:wind; night:; rescue:seal
girl | f | Ruby | stubborn; proud | market; school | share:swing; honest:vase; lose:bracelet
girl | f | Daisy | sweet; cheerful | meadow; garden | make:cake; lose:hat; grow:strawberry
girl | f | Ivy | quiet; clever | forest; garden | visitor:star; find:key; skill:whistle
boy | m | Tom | curious; brave | forest; river | find:map; make:raft; storm:rain
boy | m | Ben | strong; kind | farm; meadow | rescue:foal; grow:pumpkin; make:swing
boy | m | Jack | lively; stubborn | harbour; island | find:map; lose:compass; race:
boy | m | Max | noisy; playful | park; school | share:ball; honest:window; lose:ball
boy | m | Leo | shy; gentle | village; library | skill:sing; fear:dog; party:
boy | m | Sam | patient; helpful | garden; pond | make:soup; rescue:duckling; grow:bean
boy | m | Oscar | clever; busy | school; lighthouse | make:lantern; visitor:robot; skill:juggle
boy | m | Noah | quiet; thoughtful | beach; desert | find:stone; night:; fear:thunder
boy | m | Felix | cheerful; adventurous | mountain; market | make:kite; skill:ride; storm:snow
boy | m | Will | proud; lively | castle; village | race:; honest:cake; share:drum
boy | m | Theo | kind; curious | library; park | find:box; rescue:kitten; skill:paint
fox | mf | Finn; Ruby; Red | clever; quick; hungry | forest; meadow | race:; honest:eggs; rescue:chick; lose:scarf
rabbit | mf | Hoppy; Clover; Thistle | shy; quick; soft | meadow; garden | fear:dark; grow:carrot; race:; make:soup
mouse | mf | Pip; Nibbles; Tilly | tiny; brave; busy | castle; library; farm | find:key; rescue:lion; honest:cheese; skill:read
bear | mf | Bruno; Honey; Barney | big; sleepy; hungry | cave; forest | make:cake; night:; storm:snow; share:honey
owl | mf | Olive; Hoot; Oscar | wise; old; quiet | forest; hills | fear:dark; skill:read; night:; find:feather
cat | mf | Whiskers; Luna; Mittens | lazy; proud; curious | village; harbour | honest:vase; lose:bell; rescue:kitten; fear:water
puppy | mf | Biscuit; Spot; Daisy | playful; happy; noisy | park; farm | lose:bone; share:ball; skill:swim; fear:thunder
frog | mf | Freddy; Lily; Hopper | green; cheerful; small | pond; river | skill:sing; race:; rescue:fish; visitor:star
turtle | mf | Shelly; Toby; Moss | slow; patient; old | beach; pond; island | race:; find:bottle; skill:fly; party:
hedgehog | mf | Prickle; Hazel; Spike | shy; small; gentle | garden; forest | share:apple; party:; lose:lantern; storm:rain
squirrel | mf | Nutty; Hazel; Skip | busy; quick; cheerful | forest; park | lose:acorn; make:swing; share:apple; grow:oak
duckling | mf | Waddles; Puddle; Dilly | small; yellow; curious | pond; farm | skill:swim; fear:water; storm:rain; find:egg
lamb | mf | Woolly; Snowy; Bella | gentle; small; white | meadow; mountain | storm:snow; fear:thunder; night:; lose:bell
pony | mf | Star; Chestnut; Pepper | proud; lively; gentle | farm; meadow | race:; skill:dance; rescue:foal; share:apple
penguin | mf | Pebble; Waddle; Frosty | funny; small; cheerful | hills; island | skill:fly; skill:skate; race:; find:egg
elephant | mf | Ella; Tembo; Peanut | big; gentle; clumsy | jungle; desert | skill:dance; rescue:monkey; fear:mouse; make:soup
monkey | mf | Milo; Coco; Kiki | funny; noisy; quick | jungle; island | honest:banana; share:banana; skill:juggle; make:swing
lion | mf | Leo; Goldie; Rory | proud; strong; lazy | jungle; desert | skill:roar; fear:mouse; rescue:mouse; party:
snail | mf | Sheldon; Pearl; Dot | slow; tiny; patient | garden; pond | race:; lose:hat; storm:rain; skill:climb
bee | mf | Buzz; Bella; Honey | busy; tiny; golden | garden; meadow | lose:hat; make:cake; skill:dance; rescue:ladybird
parrot | mf | Polly; Rio; Mango | noisy; bright; clever | jungle; island; harbour | skill:sing; honest:banana; find:map; share:mango
whale | mf | Willow; Blue; Walter | big; gentle; lonely | island; lighthouse | skill:sing; rescue:seal; visitor:star; storm:wind
dragon | mf | Ember; Spark; Drago | small; red; lonely | cave; mountain; castle | skill:fire; make:soup; fear:dark; find:egg
giant | mf | Bumble; Grom; Olga | clumsy; huge; gentle | mountain; cave | share:honey; rescue:lamb; skill:dance; grow:bean
robot | m | Bolt; Tik; Rusty | shiny; small; curious | school; lighthouse; library | skill:paint; lose:screw; make:cake; fear:water
fairy | f | Petal; Dew; Luna | tiny; bright; kind | garden; forest | skill:magic; lose:wand; rescue:ladybird; make:crown
wizard | m | Merlo; Zed; Barnaby | old; forgetful; wise | castle; cave; library | lose:wand; skill:magic; visitor:star; find:book
witch | f | Hilda; Mab; Greta | funny; old; forgetful | forest; hills | make:soup; lose:broom; skill:fly; honest:cake
king | m | Otto; Henry; Rufus | sad; rich; lonely | castle | lose:crown; party:; night:; honest:cake
queen | f | Matilda; Rose; Agnes | wise; proud; busy | castle | grow:rose; lose:bracelet; make:cake; visitor:robot
princess | f | Amelia; Rose; Stella | brave; stubborn; curious | castle; mountain | rescue:dragon; find:key; skill:ride; race:
prince | m | Edmund; Henry; Arthur | kind; bored; shy | castle; forest | rescue:dragon; skill:flute; fear:high; find:feather
knight | mf | Roland; Joan; Percy | brave; shiny; tired | castle; hills | fear:dragon; lose:horse; rescue:dragon; storm:rain
pirate | mf | Salty; Meg; Barney | loud; greedy; jolly | island; harbour | find:map; lose:compass; share:treasure; fear:waves
snowman | m | Frosty; Carrot; Chilly | round; jolly; cold | hills; village | lose:carrot; party:; fear:sun; visitor:star
cloud | mf | Puff; Misty; Drizzle | small; grey; soft | mountain; lighthouse | skill:rain; race:; night:; rescue:flower
star | mf | Twinkle; Stella; Glow | tiny; bright; lonely | hills; lighthouse | skill:shine; lose:map; night:; rescue:ship
farmer | mf | Joe; Martha; Walter | busy; tired; kind | farm | grow:pumpkin; lose:horse; rescue:lamb; make:pie
baker | mf | Otto; Martha; Bruno | jolly; busy; round | village; market | make:cake; honest:cake; party:; share:bread
sailor | mf | Meg; Jonah; Finn | brave; old; jolly | harbour; island | storm:wind; find:bottle; lose:compass; make:raft
grandmother | f | Agnes; Rose; Hilda | old; gentle; wise | village; garden | grow:rose; make:pie; lose:mirror; party:
"""

KINDS: list[Kind] = [
    Kind(r[0], r[1], split(r[2]), split(r[3]), split(r[4]), split(r[5])) for r in rows(_KINDS)
]

_ALLIES = """
owl | mf | wise old; grey | hooted; said
squirrel | mf | busy; red | chattered; said
badger | mf | sleepy old; striped | grumbled; said
deer | mf | graceful; quiet | whispered; said
woodcutter | m | strong; friendly | said; laughed
hedgehog | mf | round; prickly | sniffed; said
snail | mf | slow; tiny | whispered; said
bee | mf | busy; fuzzy | buzzed; hummed
gardener | mf | old; cheerful | said; smiled
rabbit | mf | white; quick | squeaked; said
lamb | mf | woolly; small | bleated; said
butterfly | f | blue; delicate | whispered; sang
shepherd | mf | young; patient | called; said
otter | mf | playful; sleek | giggled; said
frog | mf | green; fat | croaked; said
duck | mf | bossy; plump | quacked; said
fisherman | m | quiet; old | said; muttered
turtle | mf | ancient; slow | said; sighed
heron | mf | tall; thin | said; whispered
crab | mf | grumpy; orange | snapped; clicked
seagull | mf | loud; white | screeched; called
sailor | mf | jolly; old | shouted; laughed
goat | mf | bearded; stubborn | bleated; said
eagle | mf | mighty; golden | cried; said
bear | mf | huge; gentle | growled; rumbled
cook | mf | round; jolly | laughed; said
knight | mf | tall; polite | said; declared
queen | f | kind; young | said; smiled
mouse | mf | tiny; clever | squeaked; whispered
baker | mf | jolly; floury | laughed; said
tailor | mf | thin; neat | said; nodded
postman | m | hurried; friendly | called; said
cat | mf | black; lazy | purred; yawned
farmer | mf | strong; busy | said; called
hen | f | brown; fussy | clucked; said
horse | mf | white; gentle | snorted; said
pig | mf | pink; muddy | grunted; oinked
parrot | mf | colourful; noisy | squawked; cried
grandmother | f | kind; old | said; smiled
bat | mf | small; shy | squeaked; whispered
dwarf | m | bearded; grumpy | grumbled; muttered
spider | mf | patient; thin | whispered; said
monkey | mf | cheeky; funny | laughed; chattered
pigeon | mf | plump; grey | cooed; said
puppy | mf | brown; playful | barked; yapped
teacher | mf | kind; young | said; smiled
librarian | mf | quiet; tall | whispered; said
wolf | mf | lonely; grey | howled; said
hare | mf | white; swift | said; laughed
reindeer | mf | strong; calm | said; snorted
elephant | mf | enormous; gentle | rumbled; said
tiger | mf | striped; sleepy | purred; growled
camel | mf | tired; wise | grunted; said
lizard | mf | quick; spotted | hissed; said
merchant | mf | rich; clever | said; laughed
fox | mf | sly; red | said; grinned
keeper | mf | lonely; old | said; called
"""

ALLIES: dict[str, Ally] = {r[0]: Ally(r[0], r[1], split(r[2]), split(r[3])) for r in rows(_ALLIES)}

ALLY_NAMES = {
    "m": ("Albert", "Gus", "Harold", "Basil", "Rupert", "Hugo", "Edgar", "Boris"),
    "f": ("Mabel", "Edith", "Flora", "Winnie", "Dora", "Pearl", "Iris", "Betty"),
}

WEATHERS = (
    "sunny",
    "cloudy",
    "windy",
    "rainy",
    "snowy",
    "foggy",
    "warm",
    "cold",
    "bright",
    "misty",
)
TIMES = ("morning", "afternoon", "evening", "day", "night")
SEASONS = ("spring", "summer", "autumn", "winter")

# verb | what was tried ; ... | how it failed ; ... | advice ; ... | how it went at last
_SKILLS = """
read | read | opened a big blue book; looked at the first page | the letters danced like ants; every word looked like a knot | Start with one word and make it your friend.; Read slowly and point at every letter. | read a whole page without stopping
skate | skate | put on a pair of old skates; stepped onto the frozen lake | both feet slid away; it ended with a bump on the ice | Bend your knees and look ahead.; Hold my hand until your feet wake up. | glided across the ice like a swan
dance | dance | spun around three times; tried a little hop and a turn | it ended with a fall on the floor; one foot got in the way of the other | Listen to the drum in your heart.; Count to three and forget who is watching. | twirled across the floor without falling once
drum | play the drum | hit the drum with two spoons; banged as fast as possible | it sounded like falling pots; everyone covered their ears | A drum needs silence too.; Play as softly as the rain. | played a rhythm that made everyone dance
whistle | whistle | blew until {his} cheeks were red; put two fingers in {his} mouth | only air came out; it sounded like a leaky kettle | Make your lips small, as if you kiss the wind.; Think of a bird and blow gently. | whistled a tune that all the birds knew
sing | sing | took a deep breath and began; tried a song about the moon | only a squeak came out; the voice cracked in the middle | Sing the way you feel.; Close your eyes and sing to one friend. | sang so sweetly that the wind stopped to listen
juggle | juggle | threw three apples into the air; started with two eggs | they all came down at once; one of them landed on {his} head | Begin with one and learn to wait.; Watch the top, not your hands. | kept four oranges in the air
ride | ride a horse | climbed onto the saddle; shook the reins | it ended in a haystack; the horse walked the wrong way | Tell the horse what you want, and be polite.; Sit tall and breathe slowly. | rode along the whole valley and back
paint | paint | dipped a brush in blue paint; painted a big yellow circle | the paint ran down the paper; it looked like a fried egg | Look first and paint later.; There are no mistakes, only new colours. | painted a sunset that seemed to glow
swim | swim | jumped into the water; kicked with both legs | it ended with a mouth full of water; nothing happened but a big splash | Lie on your back and trust the water.; Move slowly, like a leaf. | swam all the way to the other side
fly | fly | jumped from a high rock; ran down the hill and flapped | it ended in a muddy puddle; a thorny bush was in the way | Do not fight the wind.; Wait for a warm breeze and spread your arms. | rose up over the treetops
roar | roar | opened {his} mouth as wide as possible; stood on a rock and shook {his} head | only a tiny meow came out; even the ants laughed | A roar begins in the belly.; Think of something you want to protect. | roared so loudly that the leaves shook
climb | climb | held on to the lowest branch; started up the wall | it was too slippery; the branch broke with a snap | Take one small step and rest.; Do not look down until you are there. | reached the very top
fire | breathe fire | took a deep breath and puffed; coughed three times | only a thin ring of smoke came out; a few sparks fell and went out | Eat a hot pepper and think of the sun.; Fire comes when you are calm. | blew a warm orange flame
magic | do magic | waved a stick and said a long word; mixed two green powders | the spoon became a fish; there was a loud pop and a bad smell | Magic needs a kind thought.; Say the words slowly, and mean them. | filled the air with golden sparks
flute | play the flute | blew into the silver flute; tried a slow song | it shrieked like a goose; no sound came out at all | Breathe as if you blow on hot soup.; Play one note until you love it. | played a melody that made the roses open
rain | make rain | pushed and pushed; held {his} breath | not a single drop fell; only a little mist came out | Think of a thirsty flower.; Let go, and it will come by itself. | rained softly on the dry fields
shine | shine | rubbed {his} face with a cloth; stretched as far as possible | the light was too weak; it flickered and went out | You shine most when you look at others.; Wait until the night is darkest. | shone so brightly that the whole valley could see it
"""

# thing with its look | short noun | why it matters
_THINGS = """
kite | yellow kite | kite | It could fly higher than any other kite.
bracelet | silver bracelet | bracelet | It had been a gift from a dear friend.
hat | straw hat | hat | It kept the sun away.
compass | brass compass | compass | It always showed the way home.
ball | blue ball | ball | It bounced higher than a house.
scarf | woolly scarf | scarf | It was as warm as a hug.
bell | little bell | bell | It rang with every step.
bone | big bone | bone | It was the best bone in the world.
lantern | small lantern | lantern | It made the night less dark.
acorn | golden acorn | acorn | It shone like a little sun.
screw | tiny screw | screw | Without it, nothing worked.
wand | magic wand | wand | It was full of old spells.
broom | flying broom | broom | It was faster than the wind.
crown | golden crown | crown | It was heavy, but it was beautiful.
horse | white horse | horse | They had been friends for years.
carrot | orange carrot | carrot | It was the finest nose in the land.
map | shiny map | map | It showed the way through the dark sky.
mirror | round mirror | mirror | It had been in the family for a hundred years.
"""

# verb | item | has | lacks | where it comes from | how it turns out
_MAKES = """
crown | weave | crown of flowers | daisies and grass | ribbon | It smelled of summer.
pie | bake | apple pie | flour and butter | apples | It was golden and hot.
boat | build | little boat | boards and nails | a sail | It floated like a duck.
cake | bake | honey cake | eggs and flour | honey | It was as soft as a pillow.
raft | build | strong raft | logs | rope | It did not sink at all.
swing | build | swing | a smooth board | rope | It went as high as the branches.
soup | cook | pot of soup | carrots and onions | salt | It was hot and tasty.
lantern | make | paper lantern | paper and glue | a candle | It glowed like the moon.
kite | make | big kite | paper and sticks | string | It danced among the clouds.
"""

# what is feared | what happens | how it is faced
_FEARS = """
dark | the dark | the sun went down and the lamp went out | counted the stars one by one; listened to the soft songs of the night
waves | big waves | a huge wave rolled over the rocks | jumped over the small ones first; laughed when the foam tickled
dog | dogs | a large dog came around the corner | held out an open hand; stood very still and smiled
thunder | thunder | the sky turned black and thunder boomed | counted the seconds after every flash; sang as loudly as the storm
water | water | a bridge broke and there was only the water | put one foot in, and then the other; found that the water was warm
mouse | mice | a mouse ran across the path | looked closely and saw two friendly eyes; sat down and shared a crumb
high | high places | a cat called for help from the top of a tree | climbed up slowly and did not look down; held on tight and took one step after another
dragon | dragons | a dragon landed with a thump | took one step forward and said hello; saw that the dragon was crying
sun | the hot sun | the clouds flew away and it grew warm | moved into the cool shade; put on a big hat
"""

# object | what happens with it | what it leads to
_FINDS = """
seed | strange seed | planted it and watered it for a week | a tree with silver leaves grew up in one night; a flower as tall as a house came out
book | dusty book | opened it and blew on the pages | the pictures began to move; a paper bird flew out
bottle | green bottle | pulled out the cork | there was a letter from a lonely child far away; a tiny ship sailed out of it
key | rusty key | tried it in every door | a small door opened with a creak; it opened a room full of toys
map | torn map | followed the dotted line | it led to a chest of old coins; it ended at a hidden waterfall
stone | glowing stone | held it up to the moon | it began to hum a lullaby; it showed the way to a secret cave
box | wooden box | lifted the lid very slowly | soft music came out of it; it was full of old letters
feather | golden feather | blew on it three times | a great bird came down from the sky; it lifted into the air and pointed north
egg | spotted egg | kept it warm all night | a baby dragon hatched in the morning; a fluffy chick came out and sneezed
"""

# victim | where it is stuck | what saves it
_RESCUES = """
lamb | lamb | caught in a thorny bush | cut the thorns away, one by one; tied a rope around it and pulled
chick | chick | stuck under a heavy bucket | pushed the bucket with all {his} strength; dug a little tunnel
seal | baby seal | tangled in an old net | bit through the net; untied every knot
foal | foal | stuck in the deep mud | put boards over the mud; pulled and pulled until it came free
duckling | duckling | trapped in the reeds | waded in and lifted it out; made a path through the reeds
kitten | kitten | stuck on a high roof | leaned a ladder against the wall; held out a blanket so that it could jump
lion | lion | caught in a trap | chewed through the rope; opened the lock with a pin
fish | silver fish | lying on the dry sand | carried it back in a cup of water; rolled it back into the waves
monkey | young monkey | hanging from a broken vine | reached up and caught it; bent a branch down to it
mouse | mouse | trapped inside a jar | tipped the jar over; took off the lid very gently
ladybird | ladybird | caught in a sticky web | cut the web with a sharp leaf; pulled out one leg after another
dragon | young dragon | chained to a rock | broke the chain with a hammer; found the key to the lock
flower | little flower | dying in the dry ground | brought water in a shell; made a cool shadow over it
ship | ship | lost in the thick fog | lit up the whole sea; led it safely to the shore
"""

# weather event | shelter
_STORMS = """
snow | snow began to fall so thickly that the path was gone | a cabin with a warm stove; a cave with a soft bed of leaves
rain | dark clouds came and it began to pour | a dry hollow under a big oak; an empty barn full of hay
wind | a wild wind came up and tore at the trees | a stone hut with a strong door; a quiet corner behind the rocks
"""

# seed | what it became
_GROWS = """
sunflower | sunflower seed | sunflower | as tall as the roof
strawberry | strawberry plant | strawberry | as big as an apple
pumpkin | pumpkin seed | pumpkin | as big as a cart
bean | magic bean | bean plant | so high that it touched the clouds
carrot | carrot seed | carrot | too big for one basket
oak | acorn | oak tree | strong enough for a house in its branches
rose | rose bush | rose | redder than the evening sky
"""

# misdeed | what is missing or broken | owner
_HONESTS = """
book | tore a page out of a precious book | the book | librarian
eggs | took three eggs from the nest | the eggs | hen
vase | knocked over a blue vase | the vase | grandmother
window | kicked a stone through a window | the window | baker
cake | ate the whole cake in one bite | the cake | cook
cheese | stole the last piece of cheese | the cheese | cook
banana | took all the bananas from the basket | the bananas | merchant
"""

# shared thing | why there is a quarrel
_SHARES = """
swing | the swing
ball | the red ball
drum | the new drum
honey | the pot of honey
apple | the last apple
banana | the biggest banana
mango | the sweet mango
treasure | the chest of gold
bread | the fresh bread
"""

_VISITORS = """
star | a tiny star | fell out of the sky | missed the moon | built a tall ladder; threw it up with a great swing
robot | a little robot | rolled out of a silver ship | missed the other planets | fixed the broken engine; filled the ship with moonlight
"""

PAYLOADS: dict[str, dict[str, list[str]]] = {
    plot: {r[0]: r[1:] for r in rows(table)}
    for plot, table in {
        "skill": _SKILLS,
        "lose": _THINGS,
        "make": _MAKES,
        "fear": _FEARS,
        "find": _FINDS,
        "rescue": _RESCUES,
        "storm": _STORMS,
        "grow": _GROWS,
        "honest": _HONESTS,
        "share": _SHARES,
        "visitor": _VISITORS,
        "race": "",
        "party": "",
        "night": "",
    }.items()
}
