// The answer's page: copy buttons, and points of the front that open and show their row.
import { live } from "./common.js";

live();

function showTarget() {
  const row = location.hash.startsWith("#front-") && document.getElementById(location.hash.slice(1));
  if (!row) return;
  const rows = document.getElementById("front-rows");
  if (rows.contains(row)) rows.open = true;
  row.scrollIntoView({ block: "center" });
  row.focus({ preventScroll: true });
}

addEventListener("hashchange", showTarget);
showTarget();
