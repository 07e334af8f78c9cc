// The job's page: whenever the service tells of a change, the figures are fetched anew; at the end the answer opens.
import { live } from "./common.js";

live();
const box = document.getElementById("job");
const shown = ["incumbent", "bound", "gap", "seconds", "note"];
const spoken = document.getElementById("spoken");
const events = new EventSource(box.dataset.events);

async function refresh() {
  const response = await fetch(box.dataset.progress);
  if (!response.ok) return;
  const job = await response.json();
  if (job.is_finished) {
    events.close();
    location.replace(location.pathname);
    return;
  }
  for (const name of shown) document.getElementById(name).textContent = job[name];
  document.getElementById("closed").value = job.closed;
  const words = job.words[0].toUpperCase() + job.words.slice(1);
  const heading = document.getElementById("words");
  if (heading.textContent !== words) {
    heading.textContent = words;
    spoken.textContent = `${words}; best so far ${job.incumbent}, gap ${job.gap}`;
  }
  document.getElementById("cancel")?.toggleAttribute("hidden", !job.can_stop);
}

for (const state of ["queued", "running", "done", "failed", "cancelled"]) events.addEventListener(state, refresh);
