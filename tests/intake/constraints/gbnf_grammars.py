"""Grammars in GBNF as people write them, with texts that each describes and texts that it does not.
Together they have every feature of GBNF but tokens."""

from __future__ import annotations

ARITHMETIC = r"""
# Equations, each in a line of its own, with white space after every word.
root    ::= (sum "=" ws product "\n")+
sum     ::= product ([-+] ws product)*
product ::= factor ([*/] ws factor)*
factor  ::= name | number | "(" ws sum ")" ws
name    ::= [a-z] [a-z0-9_]* ws
number  ::= [0-9]+ ("." [0-9]{1,3})? ws
ws      ::= [ \t\n]*
"""
JSON = r"""
root   ::= ws value
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
    pair ("," ws pair)*
  )? "}" ws
pair   ::= string ":" ws value

array  ::=
  "[" ws (
    value
    ("," ws value)*
  )? "]" ws

string ::= "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws

# Not endless: a weak model would write white space for ever.
ws ::= | " " | "\n" [ \t]{0,20}
"""
LIST = r"""
root ::= (bullet | numbered)+
bullet ::= ("- " | "* ") line
numbered ::= [1-9] [0-9]? ". " line
line ::= [^\r\n]+ "\n"
"""
MOVES = r"""
# Two moves a line, numbered, as chess players write them.
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " (move "\n" | result))*
move ::= (pawn | piece | castles) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? square
pawn ::= ([a-h] "x")? square ("=" [NBQR])?
square ::= [a-h] [1-8]
castles ::= "O-O" "-O"?
result ::= "1-0" | "0-1" | "1/2-1/2"
"""
PROGRAM = r"""
root ::= function+
function ::= type name "(" (type name ("," ws type name)*)? ")" ws block
type ::= ("int" | "float" | "char") sp
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
block ::= "{" ws statement* "}" ws
statement ::=
    ( type name ws "=" ws expression ";" ws ) |
    ( name ws ("=" ws expression | "(" list? ")" ws) ";" ws ) |
    ( "return" sp expression ";" ws ) |
    ( "while" ws "(" ws condition ")" ws block ) |
    ( "if" ws "(" ws condition ")" ws block ("else" ws block)? ) |
    comment ws
condition ::= expression ("<=" | "<" | "==" | "!=" | ">=" | ">") ws expression
expression ::= term ([-+] ws term)*
term ::= unary ([*/] ws unary)*
unary ::= "-" unary | name ("(" ws list? ")")? ws | [0-9]+ ws | "(" ws expression ")" ws
list ::= expression ("," ws expression)*
comment ::= "//" [^\n]* "\n" | "/*" ( [^*] | "*" [^/] )* "*/"
sp ::= [ \t\n]+
ws ::= sp?
"""
SCRIPTS = r"""
root ::= sentence+
sentence ::= word ([ \u3001] word)* stop
word ::= (hiragana | katakana | han | accented)+ | emoji{1,3}
hiragana ::= [ぁ-ゟ]
katakana ::= [\u30A0-\u30FF]
han ::= [\u4e00-\u9FFF\U00020000-\U0002A6DF]
accented ::= "\u00e9" | [à-ý]
emoji ::= "\U0001F600" | [\U0001F601-\U0001F64F]
stop ::= [。！？] | "\x2E\x0A"
"""
PUNCTUATION = r"""
Root-2 ::= start-end | UPPER_case | rule_123 | 7th
root ::= "<" Root-2{2} ">" | "{" [-+*/]{3} "}" |
    [\[\]"^\\-]{2,} | [a\-z] "\\" "\"" "\[" "]" [+--] | ""
start-end ::= start "\t" end
start ::= "s" | "\r\n"
end ::= .
UPPER_case ::= [^a-zA-Z\n]
rule_123 ::= "x"{0,2} "y"{2,} ("z"{3} | "zz")
7th ::= "7" ("th" | ("st" | ("nd")))? [\] x-]*
"""
LEFT_AND_RIGHT = r"""
root ::= left "." right "." middle
left ::= left "+" digit | digit
right ::= digit "^" right | digit
middle ::= "(" middle ")" | middle middle | ""
digit ::= [0-9]
"""
EMPTY = r"""
root ::= (a* b?)* c{0,3} ((d?)+)? ""*
a ::= "" | "a"
b ::= ("b"?){2}
c ::= |
    "c" |
    "cc"
d ::= e
e ::= d | "d" | ""
"""
ENDLESS = 'root ::= num "\\n"\nnum ::= [0-9] ws\nws ::= [ \\n]*'
CSV = r"""
root ::= row{2,4}
row ::= cell ("," cell){2} "\r"? "\n"
cell ::= plain | quoted
plain ::= [^,"\r\n]*
quoted ::= "\"" ([^"] | "\"\"")* "\""
"""
ANY = 'root ::= "a" .{2} [^a] .* "z"'

CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "arithmetic": (
        ARITHMETIC,
        ["1=1\n", "a + 12 * (b_1 - 3.25) = 7 \n", "x=2\n\n \ny = (((x)))/4*z\n  \n"],
        ["1=1", "", "1 + = 2\n", "(a = 1\n", "3.1415=1\n", "A=1\n", "1=1+1\n"],
    ),
    "json": (
        JSON,
        [
            '{"name": "Ana", "tags": ["x", {"y": [1,2.5e3,null,true]}], "é\\n": -0}',
            "[]",
            " [\n    []\n]",
            '"\\u00e9日本😀"',
            "-12.5E+10",
            "false ",
        ],
        ["{", "[1,]", '"\\x"', "01", "tru", '{"a" 1}', "[1\n\n]", '"a\nb"', ""],
    ),
    "list": (
        LIST,
        ["- milk\n", "* a\n1. b - 2\n99. ünï😀\n"],
        ["- \n", "-milk\n", "- a", "0. a\n", "100. a\n"],
    ),
    "moves": (
        MOVES,
        ["1. e4 e5\n", "1. e4 e5\n2. Nf3 Nc6\n3. O-O Qxe7+\n10. bxc8=Q# O-O-O\n11. Ra1xb2 1-0"],
        ["1. e4\n", "1. e9 e5\n", "1. e4 e5\n0. e4 e5\n", "1. O-O-O-O e5\n", "2. e4 e5\n"],
    ),
    "program": (
        PROGRAM,
        [
            "int f(){}",
            "int main(int argc, char argv) {\n  int x = -g(1, 2) * (3 + y);\n"
            "  while (x <= 10) { x = x+1; }\n  if (a!=b) {return 1;} else { p(); } // done\n"
            "  /* a * b */\n}\n",
        ],
        ["int f() { return1; }", "f(){}", "int f(){ /* a */ b */ }", "int f(){x=1}", "int 1f(){}"],
    ),
    "scripts": (
        SCRIPTS,
        ["日本語のテキスト。", "カタカナ、ひらがな 𠀀é！😀😁？", "àý.\n"],
        ["日本語", "abc。", "😀😀😀😀。", "日。\n", "×é.", "。"],
    ),
    "punctuation": (
        PUNCTUATION,
        [
            "",
            "<s\t\n7th>",
            "<\r\n\tx!>",
            "<yyzz7>",
            "<xxyyyzzz7nd- x]>",
            "{+-/}",
            '["',
            "\\^-]",
            '-\\"[]+',
            'z\\"[]-',
        ],
        [
            "<s\t>",
            "<7th>",
            "<aa>",
            "{++}",
            "[",
            'b\\"[]+',
            'a\\"[]*',
            "<yzz7>",
            "<xxxyyzz7>",
            "<\n7>",
        ],
    ),
    "recursion": (
        LEFT_AND_RIGHT,
        ["1.2.", "1+2+3.4^5^6.(()())()", "0.0.()"],
        ["1+.2.", "1.2^.", "1.2.)(", "1.2.(", "..", "1"],
    ),
    "empty": (
        EMPTY,
        ["", "a", "aabbabbbb", "ccc", "accccccd", "bdddd"],
        ["da", "ccccccc", "e", "cb", "dc"],
    ),
    "endless": (ENDLESS, ["1\n", "1\n\n", "7  \n \n", "1 \n"], ["1", "1 ", "\n", "12\n", "1\n "]),
    "csv": (
        CSV,
        ["a,b,c\n,,\n", 'x,"a ""b"", c\n",y\r\n1,2,3\n'],
        ["a,b,c\n", "a,b\na,b\n", 'a,b,"\na,b,c\n', 'a"b,c,d\n,,\n'],
    ),
    "any": (ANY, ["a\n\rbz", "azzzz", "a日😀\nazz\n\nz"], ["az", "aa\naz", "abcdx", "\nabcz"]),
}
