"use strict";
{
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const config = { displayModeBar: false, responsive: true };
  const kinds = { u1: Uint8Array, f4: Float32Array, f8: Float64Array };
  const select = byId("method");
  const slider = byId("coverage");
  let method = 0;

  const unpacked = ({ kind, bytes }) => new kinds[kind](Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0)).buffer);

  /* Scores of each method, in rising order, and how many of the first i known images are predicted right. */
  const scores = data.methods.map((m) => m.scores.map(unpacked));
  const right = data.methods.map(({ correct }) => {
    if (correct === null) return null;
    const counts = [0];
    for (const one of unpacked(correct)) counts.push(counts[counts.length - 1] + one);
    return counts;
  });

  /* Colours: figures name those of the style sheet, and Plotly wants their values. */
  const coloured = (value, style) => {
    if (typeof value === "string") return value.startsWith("var(") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
    if (Array.isArray(value)) return value.map((v) => coloured(v, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, style)]));
  };

  const draw = (id, { figure, summary }) => {
    const { data: traces, layout } = coloured(figure, getComputedStyle(document.documentElement));
    byId(`${id}-summary`).textContent = summary;
    return Plotly.react(id, traces, layout, config);
  };

  /* The threshold: the smallest that accepts this share of the known scores, as qualms.Threshold.from_scores has it. */
  const thresholdFor = (sorted, share) => sorted[Math.max(1, Math.ceil(share * sorted.length - 1e-9)) - 1];

  const accepted = (sorted, threshold) => {
    let [low, high] = [0, sorted.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] <= threshold) low = middle + 1;
      else high = middle;
    }
    return low;
  };

  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const brief = (x) => String(Number(x.toPrecision(4)));

  const tell = (id, text, value) => {
    byId(id).textContent = text;
    byId(id).dataset.value = value;
  };

  const moveThreshold = () => {
    const [known, ...unknown] = scores[method];
    const threshold = thresholdFor(known, slider.value / 100);
    const count = accepted(known, threshold);
    const told = [`${percent(count / known.length)} of ${data.groups[0]} accepted`];
    byId("asked").textContent = percent(slider.value / 100);
    tell("threshold", brief(threshold), threshold);
    tell("covered", percent(count / known.length), count / known.length);
    if (right[method]) {
      const share = right[method][count] / count;
      tell("accuracy", percent(share), share);
      told.push(`${percent(share)} of them right`);
    }
    unknown.forEach((sorted, i) => {
      const share = accepted(sorted, threshold) / sorted.length;
      tell(`let-through-${i + 1}`, percent(share), share);
      told.push(`${percent(share)} of ${data.groups[i + 1]} let through`);
    });
    slider.setAttribute("aria-valuetext", `threshold ${brief(threshold)}: ${told.join(", ")}`);
    const [low, high] = data.methods[method].figures.histogram.figure.range;
    const x = Math.min(Math.max(threshold, low), high);
    return Plotly.relayout("histogram", { "shapes[0].x0": x, "shapes[0].x1": x });
  };

  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  const item = (picture) => {
    const made = element("li");
    const image = element("img");
    image.addEventListener("load", () => image.classList.toggle("crisp", image.naturalWidth < 96));
    image.src = data.images[picture.image];
    image.alt = picture.alt;
    made.append(image, element("span", `predicted ${picture.predicted}`));
    if (picture.label !== null) {
      const wrong = picture.right === false;
      made.append(element("span", `label ${picture.label}${wrong ? ", wrong" : ""}`, wrong ? "wrong" : ""));
    }
    made.append(element("span", `score ${picture.score}`, "score"));
    return made;
  };

  const showPictures = () => {
    const cards = data.methods[method].gallery.map((ends, i) => {
      const card = element("div", undefined, "card");
      card.append(element("h3", `${data.groups[i]}, ${i ? "unknown" : "known"}`));
      ends.forEach((pictures, end) => {
        if (!pictures.length) return;
        const list = element("ul", undefined, "pictures");
        list.append(...pictures.map(item));
        card.append(element("h4", end ? "least certain" : "most certain"), list);
      });
      return card;
    });
    byId("pictures").replaceChildren(...cards);
  };

  const inOrder = (layers) => {
    const order = layers.orders[method];
    const [map] = layers.figure.data;
    const traces = [{ ...map, z: map.z.map((row) => order.map((i) => row[i])) }];
    return { ...layers, figure: { ...layers.figure, data: traces } };
  };

  const drawMethod = () => {
    for (const [id, each] of Object.entries(data.methods[method].figures)) draw(id, each);
    data.fixed.layers.forEach((each, i) => draw(`layers-${i}`, inOrder(each)));
    moveThreshold();
  };

  const drawAll = () => {
    for (const part of ["glance", "learning"]) data.fixed[part].forEach((each, i) => draw(`${part}-${i}`, each));
    drawMethod();
  };

  const choose = () => {
    method = Number(select.value);
    for (const name of document.querySelectorAll(".chosen")) name.textContent = data.methods[method].name;
    showPictures();
  };

  /* Sorting: numbers from the highest, words from A; again turns it round. */
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    const key = cell.dataset.key ?? cell.textContent;
    return key === "" || Number.isNaN(Number(key)) ? key : Number(key);
  };

  const sortBy = (heading) => {
    const body = byId("methods").tBodies[0];
    const rows = [...body.rows];
    const column = heading.cellIndex;
    const numbers = rows.some((row) => typeof keyOf(row, column) === "number");
    const first = numbers ? "descending" : "ascending";
    const other = numbers ? "ascending" : "descending";
    const direction = heading.getAttribute("aria-sort") === first ? other : first;
    const sign = direction === "ascending" ? 1 : -1;
    rows.sort((a, b) => {
      const [x, y] = [keyOf(a, column), keyOf(b, column)];
      return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
    });
    for (const each of byId("methods").tHead.rows[0].cells) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", direction);
    body.append(...rows);
  };

  for (const heading of byId("methods").tHead.rows[0].cells) {
    heading.firstElementChild.addEventListener("click", () => sortBy(heading));
  }
  select.addEventListener("change", () => {
    choose();
    drawMethod();
  });
  slider.addEventListener("input", moveThreshold);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  select.value = "0"; // a browser may remember another choice
  choose();
  drawAll();
}
