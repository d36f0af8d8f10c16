"""Questions for a model that has been taught to answer: kinds of request times subjects. What the model itself answers is
what a head learns from, so the texts here are only beginnings. Knows no model and no tokenizer.

    "Explain {} to a child."  x  "how bread rises"  ->  "Explain how bread rises to a child."

A tenth of the subjects stand in no question that is learnt from; `unseen` asks about those alone.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

SEED = 20_251
HELD_OUT = 10  # every so many subjects one is kept for measuring


class Kind(NamedTuple):
    """Requests that fit the same subjects. "{}" is the place of the subject."""

    forms: tuple[str, ...]
    subjects: tuple[str, ...]


def words(text: str) -> tuple[str, ...]:
    """The parts of a text between semicolons."""
    return tuple(" ".join(part.split()) for part in text.split(";"))


IDEAS = Kind(
    forms=(
        "Explain {} to a child.",
        "Explain {} in simple terms.",
        "What is {}, and why does it matter?",
        "Write a short essay about {}.",
        "Give me five facts about {}.",
        "Summarize the most important ideas behind {}.",
        "What are common misunderstandings about {}?",
        "How has {} changed over time?",
        "Write an introduction to {} for a textbook.",
        "What questions would you ask an expert on {}?",
        "Describe the advantages and disadvantages of {}.",
        "Give a real-world example of {}.",
        "I know nothing about {}. Where should I begin?",
        "Write a paragraph about {}.",
        "Tell me about {}.",
        "Can you explain {} step by step?",
        "List the key terms that one needs to understand {}.",
        "Write three quiz questions about {} with their answers.",
        "Why do people care about {}?",
        "Make an outline of a lecture about {}.",
    ),
    subjects=words(
        """photosynthesis; gravity; supply and demand; the water cycle; evolution; democracy; black holes; vaccines;
        inflation; plate tectonics; machine learning; the greenhouse effect; electricity; magnetism; the immune system;
        the French Revolution; the Roman Empire; the printing press; the industrial revolution; probability; prime
        numbers; negative numbers; fractions; the Pythagorean theorem; DNA; the food chain; volcanoes; earthquakes;
        the moon's phases; tides; the seasons; recycling; renewable energy; nuclear power; the stock market; compound
        interest; insurance; taxes; the Renaissance; impressionism; jazz; opera; the human heart; sleep; memory;
        the nervous system; digestion; photography; the internet; encryption; blockchains; databases; operating systems;
        compilers; neural networks; climate change; biodiversity; coral reefs; rain forests; deserts; glaciers; the
        ozone layer; sound waves; light; lenses; rainbows; thunderstorms; hurricanes; the solar system; comets; galaxies;
        the big bang; atoms; the periodic table; chemical reactions; acids and bases; crystals; metals; plastic; glass;
        fermentation; yeast; bees and pollination; bird migration; whales; dinosaurs; fossils; wolves; the silk road;
        the Cold War; the moon landing; human rights; free speech; the United Nations; globalization; urbanization;
        poverty; education; public libraries; museums; the Olympic Games; chess; mindfulness; stoicism; utilitarianism;
        the scientific method; logic; paradoxes; metaphors; haiku; fairy tales; mythology; the alphabet; sign language;
        bilingualism; body language; leadership; teamwork; negotiation; motivation; habits; procrastination; stress;
        friendship; empathy; gratitude; creativity; curiosity; critical thinking; statistics; the median and the mean;
        correlation and causation; algorithms; recursion; binary numbers; time zones; calendars; maps; the compass;
        bridges; steam engines; bicycles; electric cars; airplanes; rockets; satellites; robots; 3D printing; GPS"""
    ),
)

TASKS = Kind(
    forms=(
        "How do I {}?",
        "What is the best way to {}?",
        "Give me step-by-step instructions to {}.",
        "What should I avoid when I {}?",
        "Write a checklist for someone who wants to {}.",
        "I want to {}, but I have little time. What do you suggest?",
        "My friend wants to {}. What advice would you give?",
        "What tools do I need to {}?",
        "Give me ten tips to {}.",
        "Write a beginner's guide: how to {}.",
        "Make a plan for one week to {}.",
        "Is it hard to {}? Explain.",
    ),
    subjects=words(
        """bake bread; plant tomatoes; learn the guitar; write a resume; prepare for a job interview; save money; start a
        small business; train a puppy; run a marathon; lose weight; sleep better; learn Spanish; cook rice; make coffee;
        paint a room; fix a bicycle tire; change a light bulb; organize a closet; pack for a trip; plan a wedding; host a
        dinner party; write a novel; take better photos; build a birdhouse; grow herbs indoors; remove a stain; clean an
        oven; do laundry; iron a shirt; tie a tie; read faster; remember names; study for an exam; give a speech; make
        friends in a new city; deal with a difficult coworker; ask for a raise; meditate; do yoga; improve my posture;
        reduce waste; save water at home; lower my electricity bill; choose a laptop; back up my files; set up a home
        network; choose a strong password; learn to program; build a website; write clean code; debug a program; manage a
        project; run a meeting; write an email to a client; apologize; teach a child to read; draw a face; learn to swim;
        climb a mountain; go camping; build a campfire; find north without a compass; make soup; bake a chocolate cake;
        cook pasta; make a salad; grill vegetables; brew tea; make jam; knit a scarf; sew a button; repair a chair; hang a
        picture; choose a gift; write a poem; keep a diary; start a book club; adopt a cat; care for a goldfish; build a
        compost heap; prune roses; attract butterflies; prepare for a storm; give first aid for a burn; eat healthier"""
    ),
)

TEXTS = Kind(
    forms=(
        "Write a short story about {}.",
        "Write a poem about {}.",
        "Describe {} in detail.",
        "Write the beginning of a novel about {}.",
        "Write a dialogue between two people about {}.",
        "Write a letter about {}.",
        "Write a funny story about {}.",
        "Invent a legend about {}.",
        "Write a diary entry about {}.",
        "Write a news article about {}.",
        "Continue: It was a cold evening when I first heard about {}.",
        "Write a review of a film about {}.",
    ),
    subjects=words(
        """a lost dog; a lighthouse keeper; a robot who wants to paint; a girl who finds a map; an old clock; a haunted
        house; the last tree on earth; two brothers at sea; a dragon who is afraid of fire; a journey to Mars; a small
        bakery; a winter in the mountains; a letter that never arrived; a secret garden; a train that never stops; a king
        without a crown; a city under the sea; an unexpected guest; a broken violin; a summer at the lake; a talking cat;
        a detective and a missing painting; a teacher on her first day; the first snow; a storm; a market in the morning;
        a library at night; an old fisherman; a dream; a birthday party; a forgotten village; a magic mirror; a race; a
        bridge between two worlds; a farmer and a fox; a clockmaker's daughter; a spaceship in trouble; a family dinner; a
        stranger on a bench; the sound of rain; a promise; a river; a photograph; a key; a long walk home; a wise owl"""
    ),
)

CODE = Kind(
    forms=(
        "Write a Python function that {}.",
        "Write a Python program that {}, and explain it.",
        "How can I write code that {}?",
        "Write a JavaScript function that {}.",
        "Show me a simple example of code that {}.",
        "Write a function with a docstring that {}. Then test it.",
    ),
    subjects=words(
        """reverses a string; sorts a list of numbers; finds the largest number in a list; counts the words in a text;
        checks whether a number is prime; computes the factorial of a number; prints the Fibonacci sequence; removes
        duplicates from a list; reads a file line by line; checks whether a word is a palindrome; merges two dictionaries;
        adds two matrices; converts Celsius to Fahrenheit; computes the average of a list; finds common elements of two
        lists; counts vowels; generates a random password; rolls a die; writes a list to a CSV file; parses JSON; makes a
        HTTP request; validates an email address; computes the distance between two points; implements a stack;
        implements a queue; searches a sorted list; flattens a nested list; counts how often each letter occurs; computes
        the greatest common divisor; converts a number to binary; prints a multiplication table; simulates a coin toss;
        measures the time of a function; draws a triangle of stars; rotates a list; finds the second largest number"""
    ),
)

MAIL = Kind(
    forms=(
        "Write an email to {}.",
        "Write a polite message to {}.",
        "Help me write a short letter to {}.",
        "Draft a formal letter to {}.",
    ),
    subjects=words(
        """my landlord about a broken heater; my boss asking for a day off; a customer whose order is late; my teacher about
        missing homework; a colleague who helped me; a company that sold me a broken phone; my neighbor about noise; a
        friend who moved away; the city about a pothole; a hotel to cancel a booking; a professor to ask for a
        recommendation; my team about a new schedule; a job applicant who was not chosen; my grandmother for her birthday;
        a supplier about prices; the editor of a newspaper about parks; my bank about a wrong charge; a school to thank a
        teacher; an airline about lost luggage; a doctor to change an appointment; a new employee as a welcome"""
    ),
)

PAIRS = Kind(
    forms=(
        "What is the difference between {}?",
        "Compare {}.",
        "Which is better: {}? Explain your opinion.",
        "Make a table that compares {}.",
        "What do {} have in common?",
    ),
    subjects=words(
        """cats and dogs; tea and coffee; trains and planes; books and films; the city and the countryside; Python and
        Java; butter and oil; summer and winter; weather and climate; a virus and a bacterium; a simile and a metaphor;
        speed and velocity; mass and weight; a lake and a pond; alligators and crocodiles; stocks and bonds; renting and
        buying; arrays and linked lists; threads and processes; HTTP and HTTPS; empathy and sympathy; a college and a
        university; an asteroid and a comet; jogging and cycling; email and letters; fruits and vegetables; a novel and a
        short story; leaders and managers; saving and investing; natural and artificial light; paper books and e-books"""
    ),
)

FACTS = Kind(
    forms=("{}", "{} Explain your answer.", "{} Answer in one sentence.", "Please answer: {}"),
    subjects=words(
        """What is the capital of France?; Why is the sky blue?; How many continents are there?; Who wrote Romeo and Juliet?;
        What causes rain?; How far away is the sun?; What is the largest ocean?; Why do leaves change color?; How do planes
        fly?; Why is the sea salty?; What is the tallest mountain?; How does a refrigerator work?; Why do we dream?; What
        does a heart do?; Who was Albert Einstein?; Who was Marie Curie?; Who was Leonardo da Vinci?; Who was Cleopatra?;
        What happened in 1969?; When did World War II end?; What is the speed of light?; How do bees make honey?; Why do
        cats purr?; How do fish breathe?; What is the longest river?; What do pandas eat?; Why do we yawn?; What is the
        square root of 144?; If a train travels 60 miles in 1.5 hours, how fast is it?; I have 3 apples and buy 5 more, then
        eat 2. How many are left?; What is 15 percent of 80?; A rectangle is 4 by 7. What is its area?; What is 12 times 13?;
        How many minutes are in a day?; Solve 2x + 3 = 11.; Translate "Good morning" into French.; Translate "Where is the
        station?" into Spanish.; Give me a synonym for happy.; What is the opposite of ancient?; Name three kinds of
        clouds.; Name five countries in Africa.; List the planets of the solar system.; What are the primary colors?; Who
        are you?; What can you do?; Hello! How are you today?; Tell me a joke.; Tell me something interesting.; Recommend a
        good book.; What should I cook tonight?; I feel sad today.; I am bored. What can I do?; Suggest a name for my new
        cat.; Plan a weekend in Rome.; Give me ideas for a school project.; What is a healthy breakfast?; How can I be
        happier?; What is the meaning of life?; What makes a good friend?; How do computers work?; What is love?"""
    ),
)

# How often each kind is asked for, against the others.
KINDS = ((IDEAS, 36), (TASKS, 22), (TEXTS, 14), (CODE, 9), (MAIL, 5), (PAIRS, 7), (FACTS, 7))


def learnt(num: int) -> list[str]:
    """So many different questions in an order of chance, all of them if there are fewer."""
    return _drawn(num, is_unseen=False)


def unseen(num: int) -> list[str]:
    """So many different questions about subjects that no question of `learnt` has."""
    return _drawn(num, is_unseen=True)


def _drawn(num: int, *, is_unseen: bool) -> list[str]:
    rng = random.Random(SEED)
    lines = [list(_all(kind, is_unseen=is_unseen)) for kind, _ in KINDS]
    for line in lines:
        rng.shuffle(line)
    shares = [share for _, share in KINDS]
    found: list[str] = []
    while len(found) < num and any(lines):
        line = rng.choices(lines, shares)[0]
        if line:
            found.append(line.pop())
    return found


def _all(kind: Kind, *, is_unseen: bool) -> Iterator[str]:
    for number, subject in enumerate(kind.subjects):
        if (number % HELD_OUT == HELD_OUT // 2) == is_unseen:
            yield from (form.replace("{}", subject) for form in kind.forms)
