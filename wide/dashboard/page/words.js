// Numbers as people read them, and elements from text: what comes from a run is text, and never anything else.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "text") made.textContent = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Only what changed is touched: nothing flickers, and a selection stays.
export function tell(node, text) { if (node.textContent !== text) node.textContent = text; }

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return "–";
  if (seconds < 1) return `${seconds < 0.0999 ? Number((seconds * 1000).toPrecision(2)) : Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} days`;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

export function rate(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 10 ? 1 : 2);
}

export function size(nbytes) {
  if (nbytes === null || nbytes === undefined || !isFinite(nbytes)) return "–";
  for (const [unit, one] of [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]) {
    if (Math.abs(nbytes) >= one) return `${(nbytes / one).toFixed(nbytes / one >= 100 ? 0 : 1)} ${unit}`;
  }
  return `${Math.round(nbytes)} B`;
}

export const percent = (part) => (part === null || part === undefined ? "–" : `${Math.round(100 * part)} %`);
export const mbit = (bytesPerS) => (bytesPerS === null || bytesPerS === undefined ? "–" : `${number(bytesPerS * 8e-6, 3)} Mbit/s`);

export function clock(at) {
  const when = new Date(at * 1000);
  return isNaN(when) ? "?" : when.toLocaleTimeString("en-GB");
}

export function day(at) {
  const when = new Date(at * 1000);
  return isNaN(when) ? "?" : `${when.toLocaleDateString("en-CA")} ${when.toLocaleTimeString("en-GB")}`;
}

export function colour(variable) { return getComputedStyle(document.documentElement).getPropertyValue(`--${variable}`).trim(); }

// Okabe and Ito's, which people of every colour vision can tell apart; then again, dashed.
const HUES = {
  light: ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#a89f1d", "#7f7f7f"],
  dark: ["#56b4e9", "#e69f00", "#2cc99b", "#ff8a47", "#e39ac1", "#8fa8ff", "#f0e442", "#a6a6a6"],
};
const COUNT = HUES.light.length;
export const hue = (i) => HUES[document.documentElement.dataset.theme || "light"][i % COUNT];
export const dash = (i) => (i < COUNT ? undefined : i < 2 * COUNT ? [6, 3] : [2, 3]);
