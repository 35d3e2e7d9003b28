// What of a page is cut, broken inside, overlaid, or hard to read: one line a fault.
() => {
  const faults = [];
  const named = (node) => `${node.closest("[id]")?.id ?? ""} ${node.tagName.toLowerCase()} "${(node.textContent ?? "").trim().slice(0, 40)}"`;
  const unseen = "thead, script, noscript, title, option, .segments input, .answer .text";

  if (document.documentElement.scrollWidth > document.documentElement.clientWidth) faults.push("the page is wider than the window");
  for (const node of document.body.querySelectorAll("*")) {
    if (!node.checkVisibility() || node.closest(unseen) || node.closest("svg")) continue;
    if (node.clientWidth && node.scrollWidth > node.clientWidth + 1) faults.push(`cut: ${named(node)}`);
  }

  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  while (texts.nextNode()) {
    const node = texts.currentNode, parent = node.parentElement;
    if (!node.data.trim() || !parent.checkVisibility() || parent.closest(unseen)) continue;
    const frame = parent.closest("svg, .card, .tile, header, main, footer, body").getBoundingClientRect();
    for (const { 0: word, index } of node.data.matchAll(/[^\s–/→-]+/g)) { // a line may break after these
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      const boxes = [...range.getClientRects()];
      if (boxes.some((box) => Math.abs(box.top - boxes[0].top) > 3)) faults.push(`broken inside: ${word}, in ${named(parent)}`);
      if (boxes.some((box) => box.left < frame.left - 1 || box.right > frame.right + 1)) faults.push(`outside: ${word}, in ${named(parent)}`);
    }
  }

  for (const drawing of document.querySelectorAll("svg")) {
    const labels = [...drawing.querySelectorAll("text")].map((label) => [label, label.getBoundingClientRect()]);
    labels.forEach(([label, box], index) => {
      for (const [other, its] of labels.slice(index + 1)) {
        const over = box.left < its.right && its.left < box.right && box.top < its.bottom - 2 && its.top < box.bottom - 2;
        if (over) faults.push(`overlaid: ${label.textContent} and ${other.textContent}, in ${named(drawing)}`);
      }
    });
  }

  const paint = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const pixel = (colors) => {
    paint.clearRect(0, 0, 1, 1);
    for (const color of colors) {
      paint.fillStyle = color;
      paint.fillRect(0, 0, 1, 1);
    }
    return paint.getImageData(0, 0, 1, 1).data;
  };
  const luminance = ([red, green, blue]) => {
    const linear = [red, green, blue].map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const seen = new Set();
  for (const node of document.body.querySelectorAll("*")) {
    const own = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest(unseen)) continue;
    const grounds = [];
    for (let place = node; place; place = place.parentElement) if (!(place instanceof SVGElement)) grounds.unshift(getComputedStyle(place).backgroundColor);
    const style = getComputedStyle(node), ink = node instanceof SVGElement ? style.fill : style.color;
    const [above, below] = [luminance(pixel([...grounds, ink])), luminance(pixel(grounds))].sort((one, other) => other - one);
    const contrast = (above + 0.05) / (below + 0.05);
    if (contrast < 4.5 && !seen.has(ink + grounds)) {
      seen.add(ink + grounds);
      faults.push(`contrast ${contrast.toFixed(1)}: ${named(node)}`);
    }
  }
  return faults;
};
