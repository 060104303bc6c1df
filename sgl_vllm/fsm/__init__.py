"""Structured output by automata: which texts a format allows, and which tokens.

Pure: nothing here imports vLLM, except the subpackage `vllm`, which puts the automata behind vLLM's
interface. Rooms, from the bottom up:

    errors, tables, subsets, characters   arrays and sets
    expressions, byte_dfa                 what a compiled format is made of
    syntax, nfa, regex                    patterns -> automata
    json_string, numbers, free_text       parts of formats -> automata
    schema/                               schemas, as the specification reads them
    parsed_grammar, grammar_check,        what xgrammar makes of a format -> expressions
    regular_parts, grammar_compiler
    structural_tag, gbnf                  formats -> what xgrammar parses
    automaton                             which bytes may come next, and which must
    trie_walks, vocabulary,               which tokens may come next
    terminal_walks, masks
    forced_tokenizer                      forced text -> forced tokens
    cache, worker, time_limit             compiled automata; processes with limits
    warm_up                               all loops compiled before the first request
"""
