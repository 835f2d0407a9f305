"""The sentences that the checkup reads when it is given none."""

# Short and long, a pronoun to resolve, a list, a repetition, numbers, a question: enough for heads
# of different trades to show what they do. The first two are those of many explainers of attention.
SENTENCES = (
    "The dog chased the ball because it was fast.",
    "love Apple phones",
    "The old lighthouse keeper, who had not spoken to anyone since the ferry stopped, "
    "counted the ships and wrote down what he saw.",
    "She bought apples, pears, plums and a loaf of bread, and paid 12 euros and 40 cents.",
    "Row, row, row your boat, and row it home again.",
    "Why does dividing by a square root keep a softmax from choosing only one word?",
    "He did not say that she had left; she said that he had.",
    "When the river rose in spring, the engineers opened the upper gate first, and the lower "
    "fields stayed dry.",
)
