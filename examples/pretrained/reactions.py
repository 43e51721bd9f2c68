"""Chemical reactions as text (SMILES), cut into tokens, with some of them hidden.

Acids with alcohols give esters, with amines amides: `CC(=O)O.OCC>>CC(=O)OCC`. Every pair below is
such a reaction. They differ in length, so that microbatches differ in hidden tokens.
"""

import re
from pathlib import Path

import numpy as np

ACIDS = (  # each ends in its carboxyl group, C(=O)O
    "CC(=O)O",
    "C=CC(=O)O",
    "CC(C)C(=O)O",
    "ClCC(=O)O",
    "N#CCC(=O)O",
    "c1ccccc1C(=O)O",
    "COc1ccc(cc1)C(=O)O",
    "FC(F)(F)c1ccc(cc1)C(=O)O",
    "CCCCCCCCCCCC(=O)O",
    "CC(C)(C)OC(=O)NCC(=O)O",
)
NUCLEOPHILES = (  # each begins with the atom that takes the place of the acid's OH
    "OC",
    "OCC",
    "OC(C)C",
    "OCc1ccccc1",
    "OCCCCCCCC",
    "NCC",
    "NC1CCCCC1",
    "Nc1ccc(Br)cc1",
    "NCCc1ccc(OC)c(OC)c1",
    "N1CCOCC1",
)
TOKEN = re.compile(r"\[[^\]]*\]|Br|Cl|>>|.")
IGNORED = -100


def reactions() -> list[str]:
    """A hundred reactions, in an order that mixes short and long ones."""
    made = [f"{acid}.{other}>>{acid[:-1]}{other}" for acid in ACIDS for other in NUCLEOPHILES]
    return [made[i] for i in np.random.default_rng(0).permutation(len(made))]


def masked(texts: list[str], vocabulary: Path, seed: int, share: float = 0.15) -> dict:
    """Rows with hidden tokens, padded to the longest.

    Args:
      texts: reactions.
      vocabulary: the model's, a token a line.
      seed: of the choice of hidden tokens.
      share: of the tokens of a row that are hidden; one at least.

    Returns:
      `input_ids`, `attention_mask` and `labels`, `[rows, tokens]` int32: the labels are the
      hidden tokens, and -100 everywhere else.
    """
    number = {token: i for i, token in enumerate(vocabulary.read_text("utf-8").split("\n"))}
    cut = [["[CLS]", *TOKEN.findall(str(text)), "[SEP]"] for text in texts]
    shape = len(cut), max(map(len, cut))
    ids, seen = np.full(shape, number["[PAD]"], np.int32), np.zeros(shape, np.int32)
    labels = np.full(shape, IGNORED, np.int32)
    random = np.random.default_rng(seed)
    for row, tokens in enumerate(cut):
        ids[row, : len(tokens)] = [number[token] for token in tokens]
        seen[row, : len(tokens)] = 1
        hide = 1 + random.permutation(len(tokens) - 2)[: max(1, round(share * len(tokens)))]
        labels[row, hide] = ids[row, hide]
        ids[row, hide] = number["[MASK]"]
    return {"input_ids": ids, "attention_mask": seen, "labels": labels}
