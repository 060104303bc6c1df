"""Grammars in EBNF: some as users write them, and random ones."""

from __future__ import annotations

import random

GRAMMARS = {
    "json": r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= "" | " " | "\n" [ \t]{0,20}
""",
    "arithmetic, left-recursive": r"""
root ::= expr
expr ::= expr "+" term | expr "-" term | term
term ::= term "*" factor | term "/" factor | factor
factor ::= "(" expr ")" | [0-9]+
""",
    "sql": r"""
root ::= select ";"
select ::= "SELECT " columns " FROM " name (" WHERE " condition)? order? (" LIMIT " [1-9] [0-9]*)?
order ::= " ORDER BY " name (" ASC" | " DESC")?
columns ::= "*" | column (", " column)*
column ::= name | ("COUNT" | "SUM" | "AVG") "(" ("*" | name) ")"
condition ::= comparison ((" AND " | " OR ") comparison)*
comparison ::= name " " operator " " value | "(" condition ")" | "NOT " comparison
operator ::= "=" | "<>" | "<" | ">" | "<=" | ">=" | "LIKE"
value ::= [0-9]+ | "'" [^']* "'" | name | "(" select ")"
name ::= [a-z_] [a-z0-9_]*
""",
    "xml, nested": r"""
root ::= element
element ::= "<div>" content "</div>" | "<b>" content "</b>" | "<br/>"
content ::= (element | [^<&]+)*
""",
    "c": r"""
root ::= (declaration)*

declaration ::= dataType identifier "(" parameter? ")" "{" statement* "}"

dataType  ::= "int" ws | "float" ws | "char" ws
identifier ::= [a-zA-Z_] [a-zA-Z_0-9]*

parameter ::= dataType identifier

statement ::=
    ( dataType identifier ws "=" ws expression ";" ) |
    ( identifier ws "=" ws expression ";" ) |
    ( identifier ws "(" argList? ")" ";" ) |
    ( "return" ws expression ";" ) |
    ( "while" "(" condition ")" "{" statement* "}" ) |
    ( "for" "(" forInit ";" ws condition ";" ws forUpdate ")" "{" statement* "}" ) |
    ( "if" "(" condition ")" "{" statement* "}" ("else" "{" statement* "}")? ) |
    ( singleLineComment ) |
    ( multiLineComment )

forInit ::= dataType identifier ws "=" ws expression | identifier ws "=" ws expression
forUpdate ::= identifier ws "=" ws expression

condition ::= expression relationOperator expression
relationOperator ::= ("<=" | "<" | "==" | "!=" | ">=" | ">")

expression ::= term (("+" | "-") term)*
term ::= factor(("*" | "/") factor)*

factor ::= identifier | number | unaryTerm | funcCall | parenExpression
unaryTerm ::= "-" factor
funcCall ::= identifier "(" argList? ")"
parenExpression ::= "(" ws expression ws ")"

argList ::= expression ("," ws expression)*

number ::= [0-9]+

singleLineComment ::= "//" [^\n]* "\n"
multiLineComment ::= "/*" ( [^*] | ("*" [^/]) )* "*/"

ws ::= ([ \t\n]+)
""",
    "japanese": r"""
# A probably incorrect grammar for Japanese
root        ::= jp-char+ ([ \t\n] jp-char+)*
jp-char     ::= hiragana | katakana | punctuation | cjk
hiragana    ::= [ぁ-ゟ]
katakana    ::= [ァ-ヿ]
punctuation ::= [、-〾]
cjk         ::= [一-鿿]
""",
}
"""By name. All are compiled by the automata."""

GRAMMARS |= {
    "palindromes": 'root ::= p\np ::= "a" p "a" | "b" p "b" | [a-x]',
    "brackets only": 'root ::= b\nb ::= ("(" b ")" | "[" b "]")*',
    "whitespace after every nested item": 'root ::= t\nt ::= "-" t ws | [0-9]+ ws\nws ::= " "*',
    "a macro": 'root ::= "x" Regex("a+")',
    "tags": 'root ::= TagDispatch(("<a>", b))\nb ::= "x"',
    "an attribute": 'root[capture] ::= "a"',
    "a rule without an end": 'root ::= "a" | "b" x\nx ::= "c" x',
}

NOT_OURS = {
    "a rule that may begin with itself": (
        'root ::= x\nx ::= y x "a" | [0-9a-z]\ny ::= "" | "(" y ")" y'
    ),
    "many states": 'root ::= ("a" | "b")* "a" ("a" | "b"){40}',
    "a limit of tokens": "root ::= x\nx[max_tokens=3] ::= [a-z]+",
    "many copies": "root ::= (([a-z]{0,100}){0,100}){0,100}",
}
"""Grammars that xgrammar takes, and the automata do not."""

LARK = {
    "JSON": r"""
        start: value
        ?value: object | array | STRING | NUMBER | "true" | "false" | "null"
        array: "[" [value ("," value)*] "]"
        object: "{" [pair ("," pair)*] "}"
        pair: STRING ":" value
        STRING: /"[^"\\]*"/
        NUMBER: /-?[0-9]+(\.[0-9]+)?/
    """,
    "left recursion": r"""
        start: sum
        sum: product | sum "+" product | sum "-" product
        product: atom | product "*" atom
        atom: NUMBER | "-" atom | "(" sum ")"
        NUMBER: /[0-9]+/
    """,
    "ignored blanks": 'start: "a" WORD+\nWORD: /[a-z]+/\n%ignore " "',
    "repetitions, letters of either case": (
        'start: item~2..4 ("," item)? tail*\nitem: "x"i\ntail: "-" DIGIT\nDIGIT: "0".."9"'
    ),
}
"""Grammars in Lark's syntax."""


def random_grammar(rng: random.Random) -> str:
    """Levels of operators over leaves that lead back through brackets, with whitespace here and
    there: with left, right and nested recursion, ambiguous or not."""
    num_levels = rng.randint(1, 4)
    levels = [f"e{i}" for i in range(num_levels)]
    rules = {
        "ws": rng.choice(["[ ]*", r"[ \n]*", '" "?', r"[ \t\n]+", '"" | " " ws']),
        "num": rng.choice(["[0-9]+", '"-"? [0-9]+ ("." [0-9]+)?', "[1-9] [0-9]{0,3}"]),
        "id": rng.choice(["[a-c]+", "[a-z_] [a-z0-9_]*", "[a-c] id | [a-c]", "[^é(0-9 ]{1,3}"]),
        "str": rng.choice(
            [r'"\"" [^"]* "\""', r'"\"" ([^"\\] | "\\" [nt"])* "\""', r'"<" [^>\n]{0,5} ">"']
        ),
    }

    def leaf() -> str:
        return rng.choice(
            [*('"a"', '"ab"', '"true"', '"tr"', '"=="', '"="'), *("num", "id", "str")]
        )

    def space() -> str:
        return rng.choice(["", " ws"])

    def operator() -> str:
        return rng.choice(['"+"', '","', '("+" | "-")', '" and "', "[*/]"])

    for level, below in zip(levels, [*levels[1:], "leaf"], strict=True):
        w = space()
        rules[level] = rng.choice(
            [
                f"{below} ({operator()}{w} {below})*",
                f"{level} {operator()}{w} {below} | {below}",
                f"{below} {operator()} {level} | {below}",
                f"{below} | {leaf()} {operator()} {below}",
                f"({operator()})? {below}{w}",
                f"{below}{w} ({operator()}{w} {below}){rng.choice(['?', '{0,2}', '*', '+'])}",
                f'{below} | {leaf()} "(" {levels[0]} ("," {levels[0]})* ")"',
            ]
        )
    begin, end = rng.choice([("(", ")"), ("[", "]"), ("<a>", "</a>")])
    inside = rng.choice(levels)
    rules["leaf"] = " | ".join(
        [
            *[leaf() for _ in range(rng.randint(1, 3))],
            f'"{begin}"{space()} {inside}{space()} "{end}"{space()}',
            *rng.choice([[], [f'"{begin}" ({inside} ("," {inside})*)? "{end}"'], ['"not " leaf']]),
        ]
    )
    first = levels[0]
    root = rng.choice([first, f'{first} "."', f'({first} "\\n")+', f'"<<" {first} ">>" | "none"'])
    return "\n".join([f"root ::= {root}", *[f"{name} ::= {body}" for name, body in rules.items()]])
