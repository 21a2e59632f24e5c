"""Where the answer is in a completion. One rule for all graders: `<think>work</think><answer>X</answer>`.

Lenient parsers pay for unfinished thoughts and for answers which the model only considered, and the same completions then
score differently under every parser. So there is one place and one rule, and no fallback.
"""

THINK_END = "</think>"
ANSWER_START = "<answer>"
ANSWER_END = "</answer>"

# Longer answers are none: scorers are quadratic or worse in places, and no task here has an answer near this length.
MAX_ANSWER_CHARS = 4096


def extract_answer(completion: str, *, must_think: bool = True) -> str | None:
    """The answer in a completion: the last complete `<answer>...</answer>` after the last `</think>`, stripped.

    Args:
        completion: decoded text of the response (the prompt is not part of it).
        must_think: a text without `</think>` has no answer; False looks at the whole text then.

    Returns:
        The text between the tags (may be empty), or None if there is no answer or it is over MAX_ANSWER_CHARS characters.
    """
    think_end = completion.rfind(THINK_END)
    if think_end >= 0:
        completion = completion[think_end + len(THINK_END) :]
    elif must_think:
        return None
    # The last opening tag that still has a closing tag behind it, then the first closing tag behind that.
    start = completion.rfind(ANSWER_START, 0, max(completion.rfind(ANSWER_END), 0))
    if start < 0:
        return None
    start += len(ANSWER_START)
    answer = completion[start : completion.find(ANSWER_END, start)].strip()
    return answer if len(answer) <= MAX_ANSWER_CHARS else None
