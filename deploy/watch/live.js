// Renews the referee's page: what was opened stays open, and nothing changes under a selection.

const opened = () => new Set([...document.querySelectorAll("details[open]")].map(keyOf));
const keyOf = (one) => one.closest(".card").querySelector("b").textContent + one.textContent.slice(0, 80);
async function renew() {
  if (document.hidden || !getSelection().isCollapsed) return;
  const stale = document.getElementById("stale");
  try {
    const reply = await fetch("report", { cache: "no-store" });
    const next = new DOMParser().parseFromString(await reply.text(), "text/html"), open = opened();
    for (const one of next.querySelectorAll("details")) one.open = open.has(keyOf(one));
    document.title = next.title;
    document.querySelector("main").replaceWith(next.querySelector("main"));
    stale.hidden = true;
  } catch {
    stale.hidden = false;
  }
}
setInterval(renew, 5000);
document.addEventListener("visibilitychange", renew);
