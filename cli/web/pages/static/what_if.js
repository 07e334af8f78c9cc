// The sliders: each move asks for the figures where they stand now, and the address keeps the place.
import { latest, live, rested } from "./common.js";

live();
const form = document.getElementById("sliders");
const figures = document.getElementById("figures");
const trouble = document.getElementById("trouble");
const reset = document.getElementById("reset");
const sliders = [...form.querySelectorAll('input[type="range"]')];
const ask = latest();

function place() {
  const moved = sliders.filter((slider) => Number(slider.value) !== Number(slider.dataset.start));
  return new URLSearchParams(moved.map((slider) => [slider.name, slider.value]));
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
form.addEventListener("input", (event) => {
  const now = document.querySelector(`#out-${event.target.name} .now`);
  now.textContent = String(Number(event.target.value));
  soon();
});
form.addEventListener("submit", (event) => { event.preventDefault(); estimate(); });
reset.hidden = false;
reset.addEventListener("click", () => {
  for (const slider of sliders) {
    slider.value = slider.dataset.start;
    document.querySelector(`#out-${slider.name} .now`).textContent = String(Number(slider.dataset.start));
  }
  estimate();
});
