/* Drawings: shapes are SVG that stretches with the page, words are HTML beside it. Colors come from the style sheet. */

const drawn = (name, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};

const canvas = (width, height, ...shapes) => {
  const made = drawn("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  made.append(...shapes);
  return made;
};

const colorOf = (i) => (i === null ? "var(--muted)" : i === 0 ? "var(--known)" : `var(--group-${((i - 1) % 6) + 1})`);
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const dashOf = (i) => (i === null ? "2 4" : DASHES[Math.floor(i / 7) % DASHES.length]); // colors come again after 7

/* Where a value stands between the ends of an axis, from 0 to 1, and back. */
const place = ({ low, high, log }, x) => {
  const share = log ? Math.log(Math.max(x, 1e-300) / low) / Math.log(high / low) : (x - low) / (high - low);
  return Math.min(1, Math.max(0, share));
};
const valueAt = ({ low, high, log }, share) => (log ? low * (high / low) ** share : low + (high - low) * share);

const ticks = ({ low, high, log }) => {
  const found = [];
  if (log) {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.ceil((last - first) / 6);
    for (let k = first; k <= last; k += every) {
      for (const digit of last - first < 3 ? [1, 2, 5] : [1]) found.push(digit * 10 ** k);
    }
  } else {
    const rough = (high - low) / 6;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((nice) => nice * power >= rough);
    for (let k = Math.ceil(low / step); k * step <= high + step / 1e6; k++) found.push(k * step);
  }
  return found.filter((x) => x >= low && x <= high * (1 + 1e-9) + 1e-12);
};

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const labelOf = (x) => {
  const [digits, exponent] = x.toExponential(2).split("e");
  if (x === 0 || Math.abs(Number(exponent)) < 4) return String(Number(x.toPrecision(6))).replace("-", "−");
  const power = `10${[...String(Number(exponent))].map((c) => SUPERSCRIPT[c]).join("")}`;
  return (Number(digits) === 1 ? power : `${Number(digits)}·${power}`).replace("-", "−");
};

const labeled = (axis, side) =>
  ticks(axis).map((x) => {
    const made = element("span", labelOf(x), "tick");
    made.style.setProperty(side, `${100 * place(axis, x)}%`);
    return made;
  });

/* One group's scores: a histogram of its own height, drawn twice, so that what is beyond the line can be darker. */
const BINS = 41; // an odd number: equal scores stand in the middle of one

const ridge = (sorted, axis, i) => {
  const edges = Array.from({ length: BINS + 1 }, (_, k) => valueAt(axis, k / BINS));
  [edges[0], edges[BINS]] = [axis.low, axis.high];
  const counts = edges.slice(1).map((edge, k) => (k === BINS - 1 ? upTo : below)(sorted, edge) - below(sorted, edges[k]));
  const most = Math.max(1, ...counts);
  const path = `M0 100${counts.map((n, k) => `V${(100 - (96 * n) / most).toFixed(2)}H${k + 1}`).join("")}V100Z`;
  const row = element("div", undefined, "ridge");
  row.style.setProperty("--color", colorOf(i));
  for (const part of ["all", "beyond"]) {
    const copy = canvas(BINS, 100, drawn("path", { d: path }));
    copy.classList.add(part);
    row.append(copy);
  }
  return row;
};

/* Lines over two axes, with a legend. */
const spanOf = (values) => {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = 0.04 * (high - low) || 0.5;
  return { low: low - room, high: high + room, log: false };
};

const chart = (target, { x, y, lines }) => {
  const xs = spanOf(lines.flatMap((line) => line.x));
  const ys = spanOf(lines.flatMap((line) => [...line.y, ...(line.low ?? []), ...(line.high ?? [])]));
  const at = (a, b) => `${(1000 * place(xs, a)).toFixed(1)} ${(1000 * (1 - place(ys, b))).toFixed(1)}`;
  const shapes = [];
  for (const value of ticks(ys)) shapes.push(drawn("path", { d: `M${at(xs.low, value)}L${at(xs.high, value)}`, class: "gridline" }));
  for (const line of lines) {
    const style = `stroke: ${colorOf(line.color)}`;
    const d = `M${line.x.map((v, k) => at(v, line.y[k])).join("L")}`;
    shapes.push(drawn("path", { d, class: "curve", style, "stroke-dasharray": dashOf(line.color) }));
    if (!line.low) continue;
    const bars = line.x.map((v, k) => `M${at(v, line.low[k])}L${at(v, line.high[k])}`).join("");
    const dots = line.x.map((v, k) => `M${at(v, line.y[k])}h0`).join("");
    shapes.push(drawn("path", { d: bars, class: "spread", style }), drawn("path", { d: dots, class: "dots", style }));
  }
  const plot = element("div", undefined, "plot");
  const [across, up] = [element("div", undefined, "axis"), element("div", undefined, "axis up")];
  across.append(...labeled(xs, "left"));
  up.append(...labeled(ys, "bottom"));
  plot.append(canvas(1000, 1000, ...shapes), up, across);
  const legend = element("ul", undefined, "legend");
  for (const { name, color } of lines) {
    const one = element("li");
    const sample = drawn("path", { d: "M0 5H24", class: "curve", style: `stroke: ${colorOf(color)}`, "stroke-dasharray": dashOf(color) });
    one.append(canvas(24, 10, sample), element("span", name));
    legend.append(one);
  }
  target.replaceChildren(legend, element("p", y, "axis-title up"), plot, element("p", x, "axis-title"));
};
