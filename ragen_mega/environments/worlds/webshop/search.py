"""Full-text search over the products, by BM25 with the original's parameters.

WebShop searches with Lucene (k1 0.9, b 0.4, Porter stems, English stop words); bm25s computes
Lucene's formula (arXiv:2407.03618). Ties and tokenization may change the ranking, so results
are called WebShop-compatible.
"""

from collections.abc import Sequence

import numpy as np
from bm25s import BM25, tokenize
from Stemmer import Stemmer

from ragen_mega.environments.worlds.webshop.catalogue import Product

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then"
    " there these they this to was will with"
).split()
MAX_HITS = 50


class SearchEngine:
    """Ranks the products of a shop. Can be shared: a search does not change it."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = products
        self._stemmer = Stemmer("porter")
        self._index = BM25(k1=0.9, b=0.4, method="lucene")
        self._index.index(
            self._words([_document(product) for product in products]), show_progress=False
        )

    def search(self, query: str) -> list[Product]:
        """Find at most 50 products that share a word with the query, best first; equal ones in the
        order of the catalogue.
        """
        (words,) = self._words([query])
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        best = np.argsort(-scores, kind="stable")[:MAX_HITS]
        return [self._products[index] for index in best if scores[index] > 0]

    def _words(self, texts: list[str]) -> list[list[str]]:
        return tokenize(
            texts,
            token_pattern=r"(?u)\b\w+\b",
            stopwords=_STOP_WORDS,
            stemmer=self._stemmer.stemWords,
            return_ids=False,
            show_progress=False,
        )


def _document(product: Product) -> str:
    """Return the indexed text of a product."""
    options = ", and ".join(
        f"{name}: {', '.join(values)}" for name, values in product.options.items()
    )
    first_bullet = product.bullets[0] if product.bullets else ""
    return " ".join((product.title, product.description, first_bullet, options)).lower()
