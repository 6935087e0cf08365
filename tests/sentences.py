"""Pairs of sentences that say the same, and pairs that do not, for all who have to tell."""

from __future__ import annotations

SAME = [
    ("Maya has a cat.", "maya has a cat"),
    ("Maya has a cat.", "Maya has the cat!"),
    ("Maya’s cat is Olive", "Maya's cat is “Olive”"),
    ("Ｍａｙａ ｈａｓ a cat", "Maya has a cat"),
    ("李明喜欢吃火锅。", "李明 喜欢吃火锅"),
    ("On weekdays Maya always bikes the long way along the river Maas", "On weekdays Maya bikes the long way along the river Maas"),
]  # fmt: skip
"""A known sentence, and one that says nothing new."""

APART = [
    ("Maya likes tea", "Maya likes green tea"),
    ("Maya eats meat", "Maya does not eat meat"),
    ("On workdays in winter Maya really does not eat meat after six", "On workdays in winter Maya really does eat meat after six"),
    ("On workdays in winter Maya really can't eat meat after six pm", "On workdays in winter Maya really eat meat after six pm"),
    ("On workdays in winter Maya really cannot eat meat after work", "On workdays in winter Maya really can eat meat after work"),
    ("On workdays nobody in Maya's big new office really eats any meat", "On workdays in Maya's big new office really eats any meat"),
    ("Maya lent Tom a bike", "Tom lent Maya a bike"),
    ("Last week in the old town Maya lent Tom a red bike", "Last week in the old town Tom lent Maya a red bike"),
    ("Maya moved from Lisbon to Porto", "Maya moved from Porto to Lisbon"),
    ("Maya flies to Rome", "Maya flies from Rome"),
    ("At the party in the old town Maya said Tom knew that Maya sang", "At the party in the old town Maya said Tom knew that sang"),
    ("Maya has 2 cats", "Maya has 3 cats"),
    ("Maya pays 3.5 euros", "Maya pays 35 euros"),
    ("It is -5 degrees", "It is 5 degrees"),
    ("At dawn the old thermometer in Maya's garden showed -5 degrees Celsius", "At dawn the old thermometer in Maya's garden showed 5 degrees Celsius"),
    ("Maya writes C++", "Maya writes C"),
    ("Maya was a nurse", "Maya is a nurse"),
    ("Maya is now here", "Maya is nowhere"),
    ("Maya wears her new blue coat 😀🎉🌧🧥🐈", "Maya wears her blue coat 😀🎉🌧🧥🐈"),
    ("小明不喜欢吃香菜和其他的味道重的菜", "小明喜欢吃香菜和其他的味道重的菜"),
    ("李明养了三只猫", "李明养了两只猫"),
    ("Maya has a cat", ""),
]  # fmt: skip
"""A known sentence, and an update that must not be taken for a duplicate."""
