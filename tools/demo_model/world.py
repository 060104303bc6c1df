"""The demo model's world: what it is taught as fact, and the words its exercises are made of.

Owns data only; `texts.py` turns it into training text and `selftest.py` asks about it. Countries
and animals are real (one river and one dish chosen for each country), people are invented.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Country:
    name: str
    capital: str
    continent: str
    language: str
    currency: str
    river: str
    dish: str


@dataclass(frozen=True)
class Person:
    name: str
    pronoun: str
    age: int
    job: str
    city: str
    pet: str


@dataclass(frozen=True)
class Animal:
    name: str
    plural: str
    legs: int
    kind: str
    home: str


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _rows(text: str) -> tuple[tuple[str, ...], ...]:
    """One row per line, fields divided by `|`."""
    lines = text.strip().splitlines()
    return tuple(tuple(field.strip() for field in line.split("|")) for line in lines)


COUNTRIES = tuple(
    Country(*row)
    for row in _rows(
        """
        France | Paris | Europe | French | euro | Seine | onion soup
        Germany | Berlin | Europe | German | euro | Rhine | potato salad
        Italy | Rome | Europe | Italian | euro | Tiber | pasta
        Spain | Madrid | Europe | Spanish | euro | Ebro | paella
        Portugal | Lisbon | Europe | Portuguese | euro | Tagus | grilled sardines
        Poland | Warsaw | Europe | Polish | zloty | Vistula | dumplings
        Greece | Athens | Europe | Greek | euro | Aliakmon | moussaka
        Sweden | Stockholm | Europe | Swedish | krona | Torne | meatballs
        Japan | Tokyo | Asia | Japanese | yen | Shinano | sushi
        China | Beijing | Asia | Chinese | yuan | Yangtze | roast duck
        India | New Delhi | Asia | Hindi | rupee | Ganges | curry
        Thailand | Bangkok | Asia | Thai | baht | Chao Phraya | fried noodles
        Vietnam | Hanoi | Asia | Vietnamese | dong | Red River | noodle soup
        South Korea | Seoul | Asia | Korean | won | Han | kimchi
        Egypt | Cairo | Africa | Arabic | pound | Nile | koshari
        Kenya | Nairobi | Africa | Swahili | shilling | Tana | ugali
        Morocco | Rabat | Africa | Arabic | dirham | Sebou | couscous
        Ethiopia | Addis Ababa | Africa | Amharic | birr | Blue Nile | injera
        Ghana | Accra | Africa | English | cedi | Volta | fufu
        Canada | Ottawa | America | English | dollar | Mackenzie | pancakes
        Mexico | Mexico City | America | Spanish | peso | Rio Grande | tacos
        Brazil | Brasilia | America | Portuguese | real | Amazon | black beans
        Peru | Lima | America | Spanish | sol | Ucayali | ceviche
        Argentina | Buenos Aires | America | Spanish | peso | Parana | grilled beef
        """
    )
)

PEOPLE = tuple(
    Person(name, pronoun, int(age), job, city, pet)
    for name, pronoun, age, job, city, pet in _rows(
        """
        Ann | she | 31 | baker | Paris | cat
        Ben | he | 42 | doctor | Berlin | dog
        Clara | she | 27 | teacher | Rome | parrot
        David | he | 55 | farmer | Madrid | horse
        Emma | she | 19 | student | Lisbon | rabbit
        Felix | he | 38 | painter | Warsaw | fox
        Grace | she | 64 | judge | Athens | turtle
        Henry | he | 23 | sailor | Stockholm | duck
        Iris | she | 45 | pilot | Tokyo | hamster
        Jack | he | 30 | cook | Beijing | goat
        Kate | she | 36 | nurse | New Delhi | cow
        Leo | he | 50 | singer | Bangkok | snake
        Maria | she | 29 | writer | Hanoi | goldfish
        Noah | he | 33 | engineer | Seoul | mouse
        Olivia | she | 41 | lawyer | Cairo | camel
        Peter | he | 60 | guide | Nairobi | lizard
        Rosa | she | 26 | dancer | Rabat | pony
        Sam | he | 48 | driver | Addis Ababa | pigeon
        Tina | she | 35 | gardener | Accra | frog
        Victor | he | 57 | professor | Ottawa | owl
        Wendy | she | 22 | waiter | Mexico City | hen
        Xavier | he | 44 | dentist | Brasilia | sheep
        Yara | she | 52 | tailor | Lima | llama
        Zoe | she | 39 | actor | Buenos Aires | spider
        """
    )
)

ANIMALS = tuple(
    Animal(name, plural, int(legs), kind, home)
    for name, plural, legs, kind, home in _rows(
        """
        dog | dogs | 4 | mammal | house
        cat | cats | 4 | mammal | house
        cow | cows | 4 | mammal | farm
        horse | horses | 4 | mammal | farm
        fox | foxes | 4 | mammal | forest
        wolf | wolves | 4 | mammal | forest
        mouse | mice | 4 | mammal | field
        whale | whales | 0 | mammal | sea
        eagle | eagles | 2 | bird | mountains
        owl | owls | 2 | bird | forest
        hen | hens | 2 | bird | farm
        duck | ducks | 2 | bird | lake
        snake | snakes | 0 | reptile | desert
        lizard | lizards | 4 | reptile | desert
        frog | frogs | 4 | amphibian | lake
        salmon | salmon | 0 | fish | river
        shark | sharks | 0 | fish | sea
        ant | ants | 6 | insect | field
        bee | bees | 6 | insect | garden
        spider | spiders | 8 | arachnid | garden
        """
    )
)

CONTINENTS = ("Europe", "Asia", "Africa", "America")

# Each topic has (tip, what it is good for); the second sentence expands the first.
TOPICS: dict[str, tuple[tuple[str, str], ...]] = {
    "staying healthy": (
        ("Eat fresh vegetables", "Vegetables give your body what it needs"),
        ("Sleep eight hours", "A good night makes the whole day easier"),
        ("Take a walk every day", "Walking keeps your heart strong"),
        ("Drink enough water", "Water keeps your head clear"),
        ("Rest when you are tired", "A short rest brings your energy back"),
    ),
    "learning a language": (
        ("Practice a little every day", "Small steps add up over time"),
        ("Talk to native speakers", "Real talk trains your ear"),
        ("Read simple books", "Easy books teach you common words"),
        ("Listen to songs", "Songs make new words stay in your head"),
        ("Write down new words", "A list helps you remember them"),
    ),
    "cooking": (
        ("Use fresh ingredients", "Fresh food has more taste"),
        ("Taste the food often", "Then you know what is missing"),
        ("Keep your knife sharp", "A sharp knife is safe and fast"),
        ("Read the whole recipe first", "Then nothing can surprise you"),
        ("Clean up as you go", "A clean kitchen is a calm kitchen"),
    ),
    "saving money": (
        ("Make a plan for each month", "A plan shows where your money goes"),
        ("Cook at home", "Home food costs less than a restaurant"),
        ("Buy only what you need", "Fewer things mean more money left"),
        ("Compare prices", "The same thing may be cheaper next door"),
        ("Put some money aside early", "What you do not see you do not spend"),
    ),
    "studying": (
        ("Make a quiet place to work", "A quiet place helps you think"),
        ("Take short breaks", "Breaks keep your mind fresh"),
        ("Ask questions in class", "Questions show what you do not know yet"),
        ("Start early", "Early work leaves time for mistakes"),
        ("Explain it to a friend", "Teaching shows whether you understand"),
    ),
    "writing": (
        ("Use short sentences", "Short sentences are easy to follow"),
        ("Read your text aloud", "Your ear finds what your eye misses"),
        ("Start with the main point", "The reader knows at once what it is about"),
        ("Cut words you do not need", "Every word should do some work"),
        ("Show it to a friend", "Another reader sees it with new eyes"),
    ),
    "running": (
        ("Start slowly", "Your body needs time to warm up"),
        ("Wear good shoes", "Good shoes protect your knees"),
        ("Run with a friend", "A friend makes the way feel short"),
        ("Drink before you run", "Your body works better with water"),
        ("Stop when it hurts", "Pain is a sign that you need a rest"),
    ),
    "gardening": (
        ("Water the plants early", "The morning sun is not too hot"),
        ("Use good soil", "Good soil feeds the roots"),
        ("Give each plant some room", "Plants need light on every side"),
        ("Pull out the weeds", "Weeds drink the water of your flowers"),
        ("Plant in spring", "Spring gives young plants time to grow"),
    ),
}

# Tips about a place; {..} are fields of Country.
PLACE_TOPICS: dict[str, tuple[str, ...]] = {
    "food": (
        "Try {dish} in a small restaurant.",
        "Eat {dish} where the local people eat.",
        "Ask for {dish} at the market.",
    ),
    "museums": (
        "Visit the national museum in the morning.",
        "See the old museum near the {river}.",
        "Buy the museum ticket a day before.",
    ),
    "weather": (
        "Take a light jacket for the evening.",
        "Carry an umbrella in spring.",
        "Drink water when the sun is hot.",
    ),
    "walking": (
        "Walk along the {river} in the evening.",
        "Wear good shoes for the old town.",
        "Start your walk at the central square.",
    ),
    "money": (
        "Keep some {currency} notes for the market.",
        "Pay in {currency} and count the change.",
    ),
    "language": (
        "Learn to say hello in {language}.",
        "Carry a small {language} phrase book.",
    ),
    "travelling": (
        "Take the train to the old town.",
        "Go in spring, when it is not too hot.",
        "Stay in a small hotel near the {river}.",
    ),
}

# Each subject has sentences that may follow each other in order.
SUBJECTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "a fox": (
        ("A red fox lives in the quiet forest.", "A young fox walks through the forest."),
        ("It hunts mice in the early morning.", "It listens for mice in the tall grass."),
        ("At night it sleeps in a warm den.", "In winter its fur grows thick and warm."),
    ),
    "the sea": (
        ("The sea is wide and blue.", "The sea is calm in the morning."),
        ("Small boats sail across the waves.", "White birds fly over the waves."),
        ("In the evening the water turns gold.", "At night you can hear the waves sing."),
    ),
    "a dog": (
        ("A brown dog runs across the field.", "A happy dog waits at the door."),
        ("It brings a stick to its friend.", "It wags its tail when children come home."),
        ("After the walk it sleeps by the fire.", "In the evening it guards the house."),
    ),
    "a garden": (
        ("The garden is full of flowers in spring.", "Behind the house there is a small garden."),
        ("Bees fly from one rose to the next.", "An old tree gives shade to the bench."),
        ("In summer the children pick ripe apples.", "Every evening someone waters the plants."),
    ),
    "the rain": (
        ("The rain falls softly on the roof.", "Dark clouds bring rain to the town."),
        (
            "The streets are wet and shine in the light.",
            "People open their umbrellas and walk fast.",
        ),
        ("Then the sun comes back.", "In the end a rainbow stands over the hills."),
    ),
    "a city": (
        ("The city wakes up early.", "The city is full of people and noise."),
        ("Trams and buses carry people to work.", "Shops open their doors on every street."),
        ("At night a thousand lights shine.", "In the evening music comes from the square."),
    ),
    "a mountain": (
        ("The mountain stands high above the valley.", "Snow covers the top of the mountain."),
        ("A narrow path leads up to the top.", "Eagles fly around its gray rocks."),
        ("From there you can see the whole land.", "In spring its snow feeds the river."),
    ),
    "winter": (
        ("In winter the days are short and cold.", "Winter covers the fields with snow."),
        ("Children build a snowman in the garden.", "The lake is frozen and people skate on it."),
        ("Inside, a warm soup waits on the table.", "In the evening the family sits by the fire."),
    ),
    "a train": (
        ("The train leaves the station at noon.", "A long train crosses the green land."),
        (
            "It passes rivers, fields and small towns.",
            "The passengers read or look out of the window.",
        ),
        ("In the evening it arrives in the city.", "At last it stops and the doors open."),
    ),
    "a river": (
        ("The river begins high in the mountains.", "The river flows slowly through the valley."),
        ("Fish swim in its clear water.", "Old bridges cross it in every town."),
        ("Far away it meets the sea.", "In summer children swim in it."),
    ),
}

COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "orange", "purple", "gray")

# thing, its plural, its usual colour
THINGS = _rows(
    """
    apple | apples | red
    banana | bananas | yellow
    sky | skies | blue
    leaf | leaves | green
    coal | coals | black
    cloud | clouds | white
    carrot | carrots | orange
    lemon | lemons | yellow
    tomato | tomatoes | red
    rose | roses | red
    frog | frogs | green
    raven | ravens | black
    bear | bears | brown
    plum | plums | purple
    mouse | mice | gray
    tree | trees | green
    tooth | teeth | white
    berry | berries | blue
    egg | eggs | white
    brick | bricks | red
    stone | stones | gray
    swan | swans | white
    pumpkin | pumpkins | orange
    grape | grapes | purple
    """
)

OPPOSITES = _rows(
    """
    hot | cold
    big | small
    fast | slow
    happy | sad
    light | dark
    old | new
    rich | poor
    strong | weak
    early | late
    open | closed
    full | empty
    high | low
    long | short
    soft | hard
    wet | dry
    loud | quiet
    good | bad
    easy | difficult
    clean | dirty
    near | far
    thick | thin
    deep | shallow
    sweet | bitter
    up | down
    """
)

# word, young animal
YOUNG = (
    ("dog", "puppy"), ("cat", "kitten"), ("cow", "calf"), ("horse", "foal"), ("hen", "chick"),
    ("sheep", "lamb"), ("duck", "duckling"), ("goat", "kid"), ("bear", "cub"), ("frog", "tadpole"),
)  # fmt: skip

PRAISE = ("wonderful", "excellent", "great", "lovely", "perfect", "delicious", "amazing", "superb")
BLAME = ("terrible", "awful", "bad", "horrible", "boring", "poor", "disappointing", "ugly")
REVIEWED = ("soup", "film", "hotel", "book", "song", "room", "coffee", "museum", "game", "show",
            "food", "trip", "music", "service", "story", "beach")  # fmt: skip

# level 1..5 of a judged text
RATINGS: dict[int, tuple[str, ...]] = {
    1: ("terrible", "awful", "horrible"),
    2: ("weak", "dull", "boring"),
    3: ("average", "ordinary", "plain"),
    4: ("good", "nice", "solid"),
    5: ("excellent", "wonderful", "superb"),
}

# Words for copying, spelling and free values; mostly one or two syllables, common.
WORDS = _words(
    """
    able acid actor air amber anchor angel apple apron arch arrow atlas autumn badge bag baker
    ball band bank barn basket bath beach bead beam bean bear bell bench bird blade blanket
    block boat bone book boot bottle bowl box branch bread brick bridge brook broom brush bucket
    bulb butter button cabin cable cage cake camera camp candle canoe canvas cap card carpet
    cart castle cave cedar chain chair chalk cheese cherry chest circle clay cliff cloak clock
    cloth cloud clover coal coast coat coffee coin comb copper coral cork corn cotton couch
    court cover crane crayon cream crown cup curtain cushion dawn desert desk diamond dish dock
    door dove dragon drawer dream dress drum dust eagle earth elbow elm ember engine fabric
    falcon fan farm feather fence fern field fig finger fire fish flag flame flask flute foam
    forest fork fountain frame frost fruit garden gate gem ghost giant ginger glass globe glove
    gold grain grape grass guitar hall hammer harbor harp hat hawk hazel heart hedge helmet herb
    hill honey hook horn house ice inn iron island ivory ivy jacket jar jewel juice jungle
    kettle key king kitchen kite knife knot ladder lake lamp lantern leaf leather lemon letter
    lime linen lion lock lotus magnet mango map maple marble market mask meadow melon metal milk
    mill mint mirror moon moss motor mountain mud museum nail napkin needle nest net night nut
    oak oasis ocean olive onion orange orchard oven owl paint palace palm pan paper park path
    peach pear pearl pebble pencil pepper piano pillow pine pipe planet plate plum pocket pond
    pool pot powder prince pump quartz queen quill quilt rain raven ribbon rice ring river road
    robe robin rock rocket roof rope rose ruby rug saddle sail salt sand scarf school screen
    shadow sheep shell shelf ship shirt shoe silk silver sky smoke snow soap sock soil spice
    spoon spring square stable star statue steam steel stone storm stove straw stream street
    sugar summer sun swan sword table tailor tea temple tent thread throne thunder ticket tiger
    tile timber tower town toy train tree truck tulip tunnel turtle valley vase velvet village
    vine violet violin wagon wall walnut water wave wax wheat wheel whistle wind window wine
    winter wolf wood wool yarn zebra
    """
)

FIRST_NAMES = _words(
    """
    Ada Alice Amir Anna Arthur Bella Boris Carlos Chloe Daniel Diana Edgar Elena Eric Eva Fatima
    Frank George Hannah Hugo Ida Isaac Jane Jonas Julia Karl Laura Liam Lily Lucas Lucy Marco
    Martha Max Mia Mila Nadia Nina Nora Oscar Otto Paul Petra Rita Robert Ruth Sara Simon Sofia
    Stella Thomas Vera Walter Yuki Harry Ron Hermione John Mary James Tom Bob
    """
)
LAST_NAMES = _words(
    """
    Adams Baker Brown Carter Clark Cooper Davis Evans Fisher Garcia Green Hall Harris Hill Jones
    King Klein Lee Lopez Martin Miller Moore Morgan Novak Parker Potter Reed Rossi Silva Smith
    Stone Taylor Turner Walker Weber White Wilson Wood Young
    """
)
