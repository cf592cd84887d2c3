"""Sums of fp32 numbers whose bits do not depend on the order of the additions.

Such a sum is a fixed-point number, in words that integers are added to. Word i counts
2^(WORD_BITS * i + LOWEST_EXPONENT). An fp32 number has 24 bits, so it adds a number below 2^24 to
each of two neighbouring words. A word of int64 has room for 2^39 of these. A last word has a flag
for each kind of number that is not finite.
"""

WORD_BITS = 24
# of the least fp32 number
LOWEST_EXPONENT = -149
# the greatest fp32 number is below 2^128
NUM_DIGITS = 12
NUM_WORDS = NUM_DIGITS + 1
FLAGS = NUM_DIGITS
IS_POSITIVE_INF, IS_NEGATIVE_INF, IS_NAN = 1, 2, 4
# Up to so many batch entries, their sums in fp32 take less.
MOST_ENTRIES = 2 * NUM_WORDS - 1
