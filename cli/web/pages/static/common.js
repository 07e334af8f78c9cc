// What several pages share.

// Says that scripts run: what stands for people without them is hidden.
export function live() {
  document.documentElement.classList.add("live");
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.hidden = !navigator.clipboard;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.closest("figure").querySelector("code").textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
}

// Calls `act` once nothing has happened for `ms` milliseconds.
export function rested(act, ms) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(act, ms); };
}

// Asks one thing at a time: a newer question ends the one before. Null where it was ended.
export function latest() {
  let running = null;
  return async (address, options = {}) => {
    running?.abort();
    const own = running = new AbortController();
    try {
      return await fetch(address, { ...options, signal: own.signal });
    } catch (error) {
      if (error.name === "AbortError") return null;
      throw error;
    }
  };
}
