"""Ask a watch's parts for their health, and for the server behind: `smoke_watch.py PROXY REFEREE [TIMEOUT_S]`."""

import sys
import time
import urllib.error
import urllib.request

proxy, referee = (url.rstrip("/") for url in sys.argv[1:3])
deadline = time.monotonic() + float((sys.argv[3:] or ["120"])[0])


def status(url):
    """The status of a reply; waits while nobody answers, or says that it cannot yet."""
    while True:
        left = deadline - time.monotonic()
        try:
            with urllib.request.urlopen(url, timeout=max(left, 1)) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            if error.code not in (429, 502, 503, 504) or left < 0:
                return error.code
        except OSError as error:
            if left < 0:
                sys.exit(f"FAILED: {url}: {error}")
        time.sleep(2)


def require(url, what, *codes):
    found = status(url)
    if found not in codes:
        sys.exit(f"FAILED: {what}: {url} answers {found}")
    sys.stdout.write(f"ok: {what}\n")


require(f"{proxy}/.truespec/health", "the proxies answer", 200)
# 401 and 403 are the server's, too, where it wants a key.
require(f"{proxy}/v1/models", "they reach the server", 200, 401, 403)
require(f"{referee}/health", "the referee has loaded its model", 200)
