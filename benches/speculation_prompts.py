"""Thirty chats whose answers repeat their prompt, and ten whose answers do not."""

from __future__ import annotations

_CODE = (
    """def total(items):
    result = 0
    for item in items:
        if item.price > 0:
            result += item.price * item.count
    return result
""",
    """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
""",
    """def read_lines(path):
    lines = []
    with open(path) as file:
        for line in file:
            line = line.strip()
            if line:
                lines.append(line)
    return lines
""",
    """function area(shape) {
  if (shape.kind === "circle") {
    return Math.PI * shape.radius * shape.radius;
  }
  return shape.width * shape.height;
}
""",
    """SELECT name, city, SUM(amount) AS amount
FROM orders
JOIN customers ON customers.id = orders.customer_id
WHERE orders.year = 2023
GROUP BY name, city
ORDER BY amount DESC;
""",
    """func Max(numbers []int) int {
    best := numbers[0]
    for _, number := range numbers {
        if number > best {
            best = number
        }
    }
    return best
}
""",
    """server:
  host: localhost
  port: 8080
  workers: 4
database:
  host: localhost
  port: 5432
  name: shop
""",
    """def fetch(url, retries=3):
    for attempt in range(retries):
        response = requests.get(url, timeout=10)
        if response.status_code == 200:
            return response.json()
    raise RuntimeError("no answer from " + url)
""",
    """int count_words(const char *text) {
    int words = 0, inside = 0;
    for (; *text; text++) {
        if (*text == ' ') inside = 0;
        else if (!inside) { inside = 1; words++; }
    }
    return words;
}
""",
    """<ul>
  <li><a href="/home">Home</a></li>
  <li><a href="/shop">Shop</a></li>
  <li><a href="/blog">Blog</a></li>
  <li><a href="/about">About us</a></li>
</ul>
""",
)
_EDITS = (
    "Rename the first function or key.",
    "Add a comment to the first line.",
    "Change one number or name, and nothing else.",
)
_RECORDS = (
    "Anna Berger, 34, lives in Vienna and works as a nurse. Her phone number is +43 1 555 0101.",
    "Order 8812: 3 lamps at 24.90, 1 table at 180.00, to be sent to 12 Mill Road, Cambridge.",
    "The train IC 533 leaves Graz at 08:14 from platform 5 and reaches Vienna at 10:50.",
    "Patient: Tom Hale, born 1961-04-02, allergic to penicillin, blood pressure 130 over 85.",
    "The laptop has 16 GB of memory, a 512 GB disk, weighs 1.3 kg and costs 1,049 euros.",
    "Meeting on 12 March at 14:00 in room 204 with Ravi, Mei and Olga about the new budget.",
    "Mount Kenya is 5,199 m high, lies in Kenya, and was first climbed in 1899 by H. Mackinder.",
    "Invoice 2041 of 3 May, from Blue Paper Ltd to Green Garden GmbH, 1,250.00 EUR, due 2 June.",
    "The song Night Drive by The Lanterns, from the album Small Hours (2019), lasts 4:12.",
    "Flight OS 87 from Vienna to New York, seat 23A, 9 October, departs 10:35, one bag.",
)
_ARTICLES = (
    "The bridge was closed on Monday after engineers found cracks in two of its cables. The city "
    "says that the repair will take six weeks. Ferries will carry people across every ten minutes.",
    "Honey bees tell each other where flowers are by a dance. The angle of the dance shows the "
    "direction to the sun, and its length shows the distance. Others follow and then fly there.",
    "The library opened in 1902 with four thousand books. Today it holds more than a million. Its "
    "reading room is open day and night, and anyone may enter without a card.",
    "The new battery can be charged in nine minutes. Its makers replaced graphite with silicon. "
    "They say that it keeps four fifths of its capacity after two thousand charges.",
    "Rain fell for eleven days without a break. The river rose by three metres and flooded the old "
    "town. Volunteers carried the paintings of the museum to the upper floor.",
    "The painter worked on the wall for two years. She used only colours that she mixed herself. "
    "When it was done she said that she would never paint indoors again.",
    "Glaciers in the Alps lost a tenth of their ice in two summers. The reason is a lack of snow "
    "in winter and heat in early summer. Small glaciers will be gone by 2040.",
    "The chess club has forty members, and the youngest is six. They meet in the back room of a "
    "bakery. On Saturdays the baker plays against everyone at once and usually wins.",
    "A team dug up a Roman kitchen under a car park. They found pots, olive stones and a recipe "
    "scratched into a tile. The car park will stay closed until spring.",
    "The telescope sees light that left its stars before the Earth was formed. Its mirror has "
    "eighteen parts. Each can be moved by less than the width of a hair.",
)
REPEATING = [
    *(
        f"{_EDITS[i % len(_EDITS)]} Answer with the whole code, and nothing else.\n\n```\n{code}```"
        for i, code in enumerate(_CODE)
    ),
    *(
        "Give every fact of this text as one JSON object, with the words of the text as values, "
        f"and then the text again.\n\n{record}"
        for record in _RECORDS
    ),
    *(
        f"Summarise this text by quoting its most important sentences word for word.\n\n{article}"
        for article in _ARTICLES
    ),
]
FREE = [
    "Tell me a story about a lighthouse keeper.",
    "What should I see in Vienna in two days?",
    "Explain how a refrigerator works.",
    "Write a letter to my grandmother about my new job.",
    "Why is the sky blue?",
    "Give me advice for learning to play the piano.",
    "Describe a market in the morning.",
    "What makes a good teacher?",
    "How do birds find their way?",
    "Invent a holiday and say how people celebrate it.",
]
