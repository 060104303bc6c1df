/* Numbers, times and small elements of the page. */

const byId = (id) => document.getElementById(id);
const number = (value) => value == null ? "?" : new Intl.NumberFormat("en").format(value);
const plural = (count, one) => `${number(count)} ${one}${count === 1 ? "" : "s"}`;

function shortAge(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

function ago(seconds) {
  return shortAge(seconds) + (seconds < 1 ? "" : " ago");
}

function duration(seconds) {
  return shortAge(Math.max(seconds, 1));
}

/** Changes nothing that is right already: a selection in it stays. */
function showText(element, text) {
  element.hidden = text === null;
  if (element.textContent !== (text ?? "")) element.textContent = text ?? "";
}

/** Without a class there is no swatch. */
function fact(swatchClass, name, value) {
  const item = document.createElement("li");
  const swatch = document.createElement("span");
  swatch.className = `swatch ${swatchClass}`;
  swatch.hidden = swatchClass === null;
  const label = document.createElement("span");
  label.textContent = name;
  label.hidden = name === "";
  item.append(swatch, label);
  if (value !== undefined) {
    const strong = document.createElement("strong");
    strong.textContent = value;
    item.append(strong);
  }
  return item;
}
