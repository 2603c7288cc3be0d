"""The tables of stored answers: what is averaged, what is pooled, and what carries a star."""

import pytest
from relay_cases import stored_history

from kvverify.experiments.relay_report import charts, difference, history_interval, markdown, scores


def plans_of(original, relay, *random):
    seeds = {f"random {seed}": one for seed, one in enumerate(random)}
    return {"original": original, "relay": relay, **seeds}


def test_random_is_averaged_over_its_seeds_before_anything_else():
    plans = plans_of(["milk", 3.0], ["cocoa", 1.0], ["cocoa", 1.0], ["milk", 2.0])
    found = {one.plan: one for one in scores([stored_history(0, plans, kinds=("fact",))])}
    assert list(found) == ["original", "relay", "random", "full"]
    assert (found["random"].exact, found["random"].f1, found["random"].nll) == (0.5, 0.5, 1.5)
    assert (found["original"].exact, found["relay"].exact, found["full"].nll) == (0, 1, 0.5)


def test_a_difference_is_plan_minus_original_and_its_clusters_are_the_histories():
    histories = [
        stored_history(0, plans_of(["milk", 3.0], ["cocoa", 1.0])),
        stored_history(1, plans_of(["milk", 3.0], ["milk", 4.0])),
    ]
    found = scores(histories)
    assert difference(found, "relay", "exact") == (0.5, 0.0, 1.0)
    assert difference(found, "relay", "nll") == (-0.5, -2.0, 1.0)
    assert difference([one for one in found if one.history == 0], "relay", "nll") == (-2.0, None, None)
    with pytest.raises(ValueError, match=r"^plan is 'score', expected one that was scored$"):
        difference(found, "score", "nll")


KINDS = ("fact", "update", "temporal", "cross")


def moving(change, *, selector="snapkv", number=0):
    """A history in which plan relay changes the NLL of every answer by `change`."""
    plans = {"original": ["milk", 3.0], "relay": ["milk", 3.0 + change]}
    return stored_history(number, plans, kinds=KINDS, selector=selector)


def test_a_star_needs_the_t_interval_over_history_means_too():
    # Means 1 and 3: the bootstrap has [1, 3], t has 2 -+ 12.7; over the eight values t would have [1.1, 2.9].
    narrow = [moving(1.0, number=0), moving(3.0, number=1)]
    found = scores(narrow)
    interval = history_interval(found, "relay", "nll")
    assert (interval.low, interval.high) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)
    assert "| +2.00 [+1.00, +3.00] |" in markdown(narrow)
    sure = [moving(change, number=number) for number, change in enumerate((2.0, 2.01))]
    assert "| +2.00 [+2.00, +2.01]* |" in markdown(sure)
    # Ten at 10 and two at -14.05: t has [+0.04, +11.94], the skewed bootstrap holds 0.
    skewed = [moving(change, number=number) for number, change in enumerate((*[10.0] * 10, *[-14.05] * 2))]
    assert history_interval(scores(skewed), "relay", "nll").low > 0
    assert "| +5.99 [-0.02, +10.00] |" in markdown(skewed)
    for change in (0.0, 0.001):  # rounding is no difference, however reliable
        assert "| +0.00 [+0.00, +0.00] |" in markdown([moving(change, number=number) for number in range(2)])
    assert "a star (*) marks" in markdown(sure).splitlines()[0]


def test_cam_is_in_no_pooled_table_and_its_own_difference_stands_apart():
    histories = [moving(0.25, number=number) for number in range(2)]
    for number, history in enumerate(histories):
        for question, other in zip(
            history["questions"], moving(-2.0, selector="cam", number=number)["questions"], strict=True
        ):
            question["cells"] += other["cells"]
    text = markdown(histories)
    assert "The 1 settings without finch and cam together" in text
    pooled = text.partition("The 1 settings")[2]
    assert (
        "| relay | 0.0 | +0.0 [+0.0, +0.0] | 0.0 | +0.0 [+0.0, +0.0] | 3.25 | +0.25 [+0.25, +0.25]* | 36.2 |" in pooled
    )
    assert "| cross | 100.0 | 0.0 | 0.0 | +0.0 [+0.0, +0.0] | 3.00 | 3.25 | +0.25 [+0.25, +0.25]* |" in pooled
    assert "cam" not in pooled.partition("BM25-B8192.")[2]
    assert "NLL under original is 3.00, where a uniform guess has 10.80. Its own settings together" in text
    assert "NLL -2.00 [-2.00, -2.00]*.\n" in text
    found = charts(histories)
    assert [row[2] for row in found["answers_plans"].rows] == [0.25]
    assert [row[:3] for row in found["answers_relay"].rows] == [("snapkv", "10 %", 0.25), ("cam", "10 %", -2.0)]


def test_no_table_is_empty_where_bm25_at_a_tenth_or_all_but_cam_was_not_run():
    text = markdown([moving(0.5)])
    assert "bm25 at 10 %" not in text
    assert text.count("| plan |") == 1
    assert "cam is not in" not in text
    alone = [moving(0.5, selector="cam")]
    text = markdown(alone)
    assert "| plan |" not in text
    assert "| kind |" not in text
    assert "| cam | 10 % |" in text
    assert list(charts(alone)) == ["answers_relay"]


def test_the_relay_table_counts_settings_that_improve_and_those_that_do_not():
    better, worse = plans_of(["milk", 3.0], ["cocoa", 1.0]), plans_of(["cocoa", 1.0], ["milk", 3.0])
    histories = [stored_history(number, better, kinds=("fact", "update", "temporal", "cross")) for number in range(2)]
    for history in histories:
        for question in history["questions"]:
            question["cells"].append({**question["cells"][0], "selector": "h2o", "plans": worse})
            question["cells"].append({**question["cells"][0], "selector": "cam", "plans": better})
            question["cells"].append({**question["cells"][0], "selector": "finch", "plans": worse})
    text = markdown(histories)
    assert (
        "Of 3 settings without finch relay is better in 2 and worse in 1 by EM, better in 2 and worse in 1 by F1, "
        "better in 2 and worse in 1 by NLL (published: better in 32 of 36). Without cam too, of 2: better in 1 and "
        "worse in 1 by EM, better in 1 and worse in 1 by F1, better in 1 and worse in 1 by NLL." in text
    )
    assert "| bm25 | 10 % | 50 % | 0.0 | 100.0 | +100.0 [+100.0, +100.0]* |" in text
    assert "| h2o | 10 % | 50 % | 100.0 | 0.0 | -100.0 [-100.0, -100.0]* |" in text
    assert (
        "| relay | 50.0 | +0.0 [+0.0, +0.0] | 50.0 | +0.0 [+0.0, +0.0] | 2.00 | +0.00 [+0.00, +0.00] | 36.2 |" in text
    )
    assert "| relay | 100.0 | +100.0 [+100.0, +100.0]* |" in text.partition("bm25 at 10 %")[2]
    assert charts(histories)["answers_relay"].rows[0] == ("bm25", "10 %", -2.0, -2.0, -2.0)
