// The sliders: each move asks for the figures where they stand now, and the address keeps the place. A slider and the
// number beside it move each other; the number may be finer than the slider's steps.
import { latest, live, rested } from "./common.js";

live();
const form = document.getElementById("sliders");
const figures = document.getElementById("figures");
const trouble = document.getElementById("trouble");
const reset = document.getElementById("reset");
const sliders = [...form.querySelectorAll('input[type="range"]')];
const ask = latest();

function number(slider) {
  return form.elements[slider.dataset.of];
}

function place() {
  const moved = sliders.map(number).filter((one) => one.value !== "" && Number(one.value) !== Number(one.dataset.start));
  return new URLSearchParams(moved.map((one) => [one.name, one.value]));
}

async function estimate() {
  const where = place();
  history.replaceState(null, "", where.size ? `?${where}` : location.pathname);
  const response = await ask(`${form.dataset.figures}?${where}`, { headers: { accept: "text/html" } });
  if (!response) return;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const table = page.querySelector("table");
  trouble.textContent = response.ok ? "" : page.querySelector(".words")?.textContent ?? "no answer";
  if (response.ok && table) figures.replaceChildren(table);
}

const soon = rested(estimate, 60);
for (const slider of sliders) {
  const own = number(slider);
  slider.hidden = false;
  slider.addEventListener("input", () => { own.value = String(Number(slider.value)); });
  own.addEventListener("input", () => { slider.value = own.value; });
}
form.addEventListener("input", soon);
form.addEventListener("submit", (event) => { event.preventDefault(); estimate(); });
reset.hidden = false;
reset.addEventListener("click", () => {
  for (const slider of sliders) slider.value = number(slider).value = number(slider).dataset.start;
  estimate();
});
