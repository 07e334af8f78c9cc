// The form: the service writes its YAML, command and problems while somebody types; the address keeps its fields.
import { latest, live, rested } from "./common.js";

live();
const form = document.getElementById("form");
const editor = document.getElementById("text");
const ask = latest();
const askText = latest();

function listed(list, errors) {
  list.replaceChildren(...errors.map((error) => {
    const item = document.createElement("li");
    item.textContent = error.field || !error.path ? error.message : `${error.path}: ${error.message}`;
    return item;
  }));
}

async function check() {
  const fields = new URLSearchParams(new FormData(form));
  const kept = new URLSearchParams([...fields].filter(([, value]) => value));
  history.replaceState(null, "", `?${kept}`);
  const response = await ask("/ask/check", { method: "POST", body: fields });
  if (!response?.ok) return;
  const view = await response.json();
  if (view.yaml) document.getElementById("yaml").textContent = view.yaml;
  document.getElementById("command").textContent = view.command;
  for (const list of form.querySelectorAll("ul.errors")) {
    const name = list.id.slice("errors-".length);
    const errors = view.errors.filter((error) => error.field === name);
    listed(list, errors);
    const input = name && form.elements[name];
    if (input) errors.length ? input.setAttribute("aria-invalid", "true") : input.removeAttribute("aria-invalid");
  }
}

async function checkText() {
  const response = await askText("/ask/check", { method: "POST", body: new URLSearchParams(new FormData(editor)) });
  if (response?.ok) listed(document.getElementById("text-errors"), (await response.json()).errors);
}

form.addEventListener("input", rested(check, 200));
editor.addEventListener("input", rested(checkText, 300));

// Tabs: arrows move between them; the editor begins with what the form has written.
const tabs = [...document.querySelectorAll('[role="tab"]')];

function show(chosen) {
  for (const tab of tabs) {
    const isChosen = tab === chosen;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
    const panel = document.getElementById(tab.getAttribute("aria-controls"));
    panel.hidden = !isChosen;
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", tab.id);
  }
}

for (const [place, tab] of tabs.entries()) {
  tab.addEventListener("click", () => {
    const spec = document.getElementById("spec");
    if (tab.id === "tab-text" && !spec.value.trim()) spec.value = document.getElementById("yaml").textContent;
    show(tab);
  });
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(place + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
}
document.querySelector(".tabs").hidden = false;
show(tabs.find((tab) => tab.getAttribute("aria-selected") === "true"));
