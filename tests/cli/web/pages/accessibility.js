// Lists what keeps people from using the page: names, order of headings, labels, tables, contrast. Runs in the page.
() => {
  const found = [];
  const seen = (element) => element.checkVisibility({ visibilityProperty: true }) && !element.closest(".hidden, .skip");
  const at = (element) => `${element.tagName.toLowerCase()}${element.id ? `#${element.id}` : ""} "${(element.textContent || "").trim().slice(0, 40)}"`;
  const say = (words, element) => found.push(element ? `${words}: ${at(element)}` : words);
  const all = (selector) => [...document.querySelectorAll(selector)];

  // The document: language, title, landmarks, one first heading, no level left out, ids once.
  if (!document.documentElement.lang) say("no language");
  if (!document.title.trim()) say("no title");
  if (all("main").length !== 1) say("not one main");
  if (all("h1").length !== 1) say("not one h1");
  let level = 0;
  for (const heading of all("h1, h2, h3, h4, h5, h6").filter(seen)) {
    const own = Number(heading.tagName[1]);
    if (own > level + 1) say(`heading after level ${level}`, heading);
    level = own;
  }
  for (const nav of all("nav")) if (!nav.getAttribute("aria-label")) say("nav without a name", nav);
  const ids = all("[id]").map((element) => element.id);
  for (const id of new Set(ids.filter((one, place) => ids.indexOf(one) !== place))) say(`id twice: ${id}`);
  for (const name of ["aria-labelledby", "aria-describedby", "aria-controls", "for"]) {
    for (const element of all(`[${name}]`)) {
      for (const id of element.getAttribute(name).split(/\s+/)) if (!document.getElementById(id)) say(`${name} names no ${id}`, element);
    }
  }

  // Names of what is used, read or looked at.
  for (const field of all("input:not([type=hidden]), select, textarea")) {
    if (!field.labels?.length && !field.getAttribute("aria-label")) say("field without a label", field);
  }
  for (const one of all("button, a[href], summary")) {
    if (!one.textContent.trim() && !one.getAttribute("aria-label")) say("nothing to read on", one);
  }
  for (const image of all("img")) if (!image.alt) say(`image without words: ${image.src}`);
  for (const drawing of all("svg")) {
    const named = drawing.getAttribute("aria-label") && ["img", "group"].includes(drawing.getAttribute("role"));
    if (!named && drawing.getAttribute("aria-hidden") !== "true" && !drawing.parentElement.closest("svg")) say("drawing without words", drawing.parentElement);
  }
  for (const region of all("[role=region]")) {
    if (!region.getAttribute("aria-label")) say("region without a name", region);
    if (region.scrollWidth > region.clientWidth && region.tabIndex < 0) say("region that scrolls without focus", region);
  }
  for (const table of all("table")) {
    if (!table.caption?.textContent.trim()) say("table without a caption", table);
    for (const head of table.querySelectorAll("th")) if (!head.scope) say("th without scope", head);
    for (const head of table.querySelectorAll("thead th")) if (!head.textContent.trim()) say("empty th in", table);
  }
  for (const element of all("[tabindex]")) if (element.tabIndex > 0) say("own order of focus", element);

  // Contrast of text to what lies behind it: WCAG 2.2, 1.4.3.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((one) => { const c = one / 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = rgba(getComputedStyle(one).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const told = new Set();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || told.has(element) || !seen(element) || element.closest("title, noscript, option, script")) continue;
    told.add(element);
    const style = getComputedStyle(element);
    const isDrawn = element instanceof SVGElement;
    const [ink, paper] = [light(rgba(isDrawn ? style.fill : style.color)), light(behind(element))];
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) say(`contrast ${ratio.toFixed(2)}`, element);
  }
  return found;
}
