// Elements, and changing a page in place: what stays the same is left alone, so that nothing flickers.

export const byId = (id) => document.getElementById(id);

/** An element with text or children: text is never markup. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

/** The same within a drawing. */
export function shape(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}

/** Give a place these children; selections, tooltips and the focus survive where a node only changes. */
export function show(place, ...wanted) {
  wanted = wanted.map((node) => (typeof node === "string" ? document.createTextNode(node) : node));
  while (place.childNodes.length > wanted.length) place.lastChild.remove();
  wanted.forEach((node, index) => {
    const present = place.childNodes[index];
    if (!present) place.append(node);
    else if (present.nodeName !== node.nodeName) present.replaceWith(node);
    else change(present, node);
  });
}

function change(present, wanted) {
  if (present.nodeType === Node.TEXT_NODE) {
    if (present.data !== wanted.data) present.data = wanted.data;
    return;
  }
  for (const { name } of [...present.attributes]) if (!wanted.hasAttribute(name)) present.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (present.getAttribute(name) !== value) present.setAttribute(name, value);
  show(present, ...wanted.childNodes);
}
