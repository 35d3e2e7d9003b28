"""From an answer and its replay to a verdict: values and arithmetic alone, nothing that waits or remembers a replica.

Other rooms use `answer` (what is judged), `judgement` (the judge), `verdicts`, what it finds by (`drift`, `draws`,
`shift`, `detectors`, `tolerance`) and `strata` (which tokens are looked at apart).
"""
