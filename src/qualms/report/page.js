{
  const data = JSON.parse(document.getElementById("data").textContent);
  const [select, field, line] = [byId("method"), byId("coverage"), byId("line")];
  let method = Number(select.querySelector("option[selected]").value);
  let coverage = Number(field.defaultValue); // in percent of the known images
  let threshold = 0;

  /* The images' columns; scores by method and group, as they are and in rising order. */
  const groups = data.groups.map((group) => ({
    ...group,
    predicted: decoded(group.predicted),
    labels: decoded(group.labels),
    confidence: unpacked(group.confidence),
    right: unpacked(group.right),
  }));
  const scores = data.methods.map((m) => m.scores.map(unpacked));
  const sorted = scores.map((each) => each.map((values) => values.slice().sort()));

  const nameOf = (group, i) => groups[group].ids?.[i] ?? `image ${i}`;

  const tell = (id, text, value, detail) => {
    byId(id).replaceChildren(text, ...(detail ? [element("small", detail)] : []));
    byId(id).dataset.value = value;
  };

  const listed = (parts) =>
    parts.flatMap((part, i) => [...(i ? [i === parts.length - 1 ? " and " : ", "] : []), ...part]);

  /* The summary, in one sentence. */
  const answer = (covered, right, through) => {
    const { name } = data.methods[method];
    const strong = (share) => element("strong", percent(share));
    const [all, taken] = [scores[method][0].length, covered * scores[method][0].length];
    const by = element("span", name, "by");
    const start = ["At ", percent(covered), ` of ${groups[0].name} accepted by `, by, ", "];
    if (through.length) {
      const parts = through.map((share, i) => [strong(share), ` of ${groups[i + 1].name}${i ? "" : " pass"}`]);
      return [...start, ...listed(parts), "."];
    }
    if (right !== null) {
      const overall = groups[0].right.reduce((a, b) => a + b, 0) / all;
      const end = ` of the accepted predictions are right, compared with ${percent(overall)} of all.`;
      return [...start, strong(right), end];
    }
    const count = Math.round(taken);
    const accepts = ` accepts ${count} of the ${all} images of ${groups[0].name} and flags `;
    const why = "without labels or unknown images, it is not known how many should be flagged.";
    return [by, accepts, element("strong", all - count), `; ${why}`];
  };

  const moveThreshold = () => {
    const [known, ...unknown] = sorted[method];
    threshold = thresholdFor(known, coverage / 100);
    const count = upTo(known, threshold);
    const covered = count / known.length;
    let right = null;
    tell("threshold", brief(threshold), threshold);
    tell("covered", percent(covered), covered, `${count} of ${known.length}`);
    if (groups[0].right) {
      const correct = scores[method][0].reduce((sum, score, i) => sum + (score <= threshold && groups[0].right[i]), 0);
      right = correct / count;
      tell("accuracy", percent(right), right, `${correct} of ${count}`);
    }
    const through = unknown.map((each, i) => {
      const passed = upTo(each, threshold);
      tell(`let-through-${i + 1}`, percent(passed / each.length), passed / each.length, `${passed} of ${each.length}`);
      return passed / each.length;
    });
    byId("answer").replaceChildren(...answer(covered, right, through));
    line.setAttribute("aria-valuenow", Number(coverage.toFixed(2)));
    line.setAttribute("aria-valuetext", `threshold ${brief(threshold)}. ${byId("answer").textContent}`);
    byId("ridges").style.setProperty("--at", `${100 * place(data.methods[method].axis, threshold)}%`);
    sorted[method].forEach((each, i) => {
      const flagged = each.length - upTo(each, threshold);
      byId(`flagged-${i}`).textContent = `${percent(flagged / each.length)} flagged`;
    });
    for (const one of document.querySelectorAll("#gallery li")) judge(one);
  };

  const setCoverage = (value) => {
    coverage = Math.min(100, Math.max(0.5, value));
    moveThreshold();
  };

  const drawRidges = () => {
    const { axis } = data.methods[method];
    const rows = sorted[method].map((each, i) => {
      const head = element("div", undefined, "ridge-head");
      const flagged = element("span", "", "flagged-share");
      flagged.id = `flagged-${i}`;
      const name = element("span", groups[i].name, "ridge-name");
      const kind = element("span", i ? "unknown" : "known", "ridge-kind");
      const outside = [
        [below(each, axis.low), "below the axis"],
        [each.length - upTo(each, axis.high), "above the axis"],
      ].filter(([count]) => count);
      name.style.setProperty("--color", colorOf(i));
      head.append(name, kind, element("span", outside.map(([count, where]) => `${count} ${where}`).join(", "), "outside"), flagged);
      const both = element("div");
      both.append(head, ridge(each, axis, i));
      return both;
    });
    byId("ridge-rows").replaceChildren(...rows);
    byId("ridge-axis").replaceChildren(...labeled(axis, "left"));
    const medians = sorted[method].map((each, i) => {
      const middle = (each[Math.floor((each.length - 1) / 2)] + each[Math.floor(each.length / 2)]) / 2;
      return `${groups[i].name} ${Number(middle.toPrecision(3))}`;
    });
    byId("ridges-summary").textContent = `Median scores: ${medians.join(", ")}. Each ridge has its own height scale.`;
  };

  /* Images. The edge under one says whether it is accepted, and follows the threshold. */
  const judge = (one) => {
    const accepted = scores[method][one.dataset.group][one.dataset.index] <= threshold;
    one.querySelector(".edge").className = `edge ${accepted ? "accepted" : "flagged"}`;
    one.querySelector(".state").textContent = accepted ? "accepted" : "flagged";
  };

  const picture = (g, i) => {
    const group = groups[g];
    const made = element("li");
    Object.assign(made.dataset, { group: g, index: i });
    const wrong = group.right !== null && !group.right[i];
    const sure = group.confidence ? `, ${percent(group.confidence[i])}` : "";
    const label = group.labels ? `label ${group.labels[i]}${wrong ? ": wrong" : ""}` : "";
    const score = `score ${Number(scores[method][g][i].toPrecision(3))}`;
    const image = element("img");
    image.addEventListener("load", () => image.classList.toggle("crisp", image.naturalWidth < 96));
    image.src = data.images[`${g}/${i}`];
    image.alt = [`${group.name}, ${nameOf(g, i)}`, `predicted ${group.predicted[i]}${sure}`, label, score].filter(Boolean).join(", ");
    if (wrong) image.className = "wrong";
    const file = element("span", nameOf(g, i), "file");
    file.title = nameOf(g, i);
    const predicted = element("span", undefined, "predicted");
    predicted.append(element("b", group.predicted[i]), sure.replace(", ", " "));
    made.append(image, element("i", undefined, "edge"), file, predicted);
    if (label) made.append(element("span", label, wrong ? "is-wrong" : ""));
    made.append(element("span", "", "state"), element("span", score, "score"));
    return made;
  };

  const strip = (g, indices) => {
    const list = element("ul", undefined, "pictures");
    list.append(...indices.map((i) => picture(g, i)));
    return list;
  };

  const showPictures = () => {
    byId("worst").querySelector("ul")?.remove();
    if (data.wrong.length) byId("worst").append(strip(0, data.wrong));
    const cards = data.methods[method].gallery.map((ends, g) => {
      const card = element("div", undefined, "card");
      card.append(element("h3", `${groups[g].name}, ${g ? "unknown" : "known"}`));
      ends.forEach((indices, end) => {
        if (indices.length) card.append(element("h4", end ? "least certain" : "most certain"), strip(g, indices));
      });
      return card;
    });
    byId("pictures").replaceChildren(...cards);
  };

  const showLayers = () => {
    if (!byId("layers")) return;
    const { summary, bars, groups: order } = data.methods[method].layers;
    const card = byId("layer-bars");
    byId("layers-summary").textContent = summary;
    card.hidden = !bars.length;
    const most = Math.max(...bars.flatMap((bar) => bar.shares), 1);
    const rows = bars.map(({ name, shares }) => {
      const row = element("div", undefined, "layer");
      row.append(element("h3", name));
      shares.forEach((share, k) => {
        const one = element("div", undefined, "share");
        const track = element("span", undefined, "track");
        const bar = element("i");
        bar.style.width = `${(100 * share) / most}%`;
        bar.style.background = colorOf(order[k]);
        track.append(bar);
        one.append(element("span", groups[order[k]].name, "who"), track, element("span", percent(share / 100), "much"));
        row.append(one);
      });
      return row;
    });
    card.replaceChildren(...rows);
  };

  const choose = (number) => {
    method = number;
    select.value = String(number);
    for (const name of document.querySelectorAll(".chosen")) name.textContent = data.methods[method].name;
    for (const row of document.querySelectorAll("#methods tbody tr")) {
      const mine = Number(row.dataset.method) === method;
      row.classList.toggle("chosen-row", mine);
      row.querySelector(".pick").setAttribute("aria-pressed", mine);
    }
    drawRidges();
    showPictures();
    showLayers();
    for (const [id, figure] of Object.entries(data.methods[method].curves)) showFigure(id, figure);
    moveThreshold();
  };

  const showFigure = (id, figure) => {
    chart(byId(id), figure);
    byId(`${id}-summary`).textContent = figure.summary;
  };

  /* Sorting: numbers from the highest, words from A; again turns it round. Methods kept only for comparison stay below. */
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    const key = cell.dataset.key ?? cell.querySelector("button").textContent;
    return key === "" || Number.isNaN(Number(key)) ? key : Number(key);
  };

  const sortBy = (heading) => {
    const bodies = [...byId("methods").tBodies];
    const column = heading.cellIndex;
    const numbers = [...bodies[0].rows].some((row) => typeof keyOf(row, column) === "number");
    const [first, other] = numbers ? ["descending", "ascending"] : ["ascending", "descending"];
    const direction = heading.getAttribute("aria-sort") === first ? other : first;
    const sign = direction === "ascending" ? 1 : -1;
    for (const each of byId("methods").tHead.rows[0].cells) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", direction);
    for (const body of bodies) {
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [keyOf(a, column), keyOf(b, column)];
        return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
      });
      body.append(...rows);
    }
  };

  /* All scores as a table, with the decision at the threshold as it stands. */
  const quoted = (value) => (/[",\n\r]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));

  const table = () => {
    const rows = [["group", "id", "prediction", "confidence", "label", "accepted", ...data.methods.map((m) => `score_${m.name}`)]];
    groups.forEach((group, g) => {
      for (let i = 0; i < scores[0][g].length; i++) {
        const own = [group.name, group.ids?.[i] ?? i, group.predicted[i], group.confidence?.[i] ?? "", group.labels?.[i] ?? ""];
        rows.push([...own, scores[method][g][i] <= threshold, ...scores.map((each) => each[g][i])]);
      }
    });
    return rows.map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
  };

  const download = () => {
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([table()], { type: "text/csv" }));
    link.download = "scores.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  /* The line is dragged by the mouse or a finger, and moved by keys. */
  const STEPS = { ArrowRight: 0.5, ArrowUp: 0.5, ArrowLeft: -0.5, ArrowDown: -0.5, PageUp: 5, PageDown: -5, Home: -100, End: 100 };

  const setField = (value) => {
    setCoverage(value);
    field.value = String(Number(coverage.toFixed(1)));
  };

  const drag = (event) => {
    const box = byId("ridges").getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const { axis } = data.methods[method];
    const known = sorted[method][0];
    // At the right end of the axis everything is accepted, also what lies beyond it.
    const count = share === 1 ? known.length : upTo(known, valueAt(axis, share));
    setField((100 * Math.max(1, count)) / known.length);
  };

  byId("ridges").addEventListener("pointerdown", (event) => {
    event.preventDefault();
    byId("ridges").setPointerCapture(event.pointerId);
    line.focus({ preventScroll: true });
    drag(event);
  });
  byId("ridges").addEventListener("pointermove", (event) => {
    if (byId("ridges").hasPointerCapture(event.pointerId)) drag(event);
  });
  line.addEventListener("keydown", (event) => {
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    setField(Math.round(2 * coverage) / 2 + STEPS[event.key]);
  });
  field.addEventListener("input", () => field.value && setCoverage(Number(field.value)));
  field.addEventListener("change", () => setField(coverage));
  byId("download").addEventListener("click", download);
  byId("more")?.addEventListener("change", ({ target }) => byId("table-card").classList.toggle("all", target.checked));
  byId("unfold")?.addEventListener("click", ({ target }) => {
    byId("folded").hidden = !byId("folded").hidden;
    target.setAttribute("aria-expanded", !byId("folded").hidden);
    target.textContent = target.textContent.replace(/^\w+/, byId("folded").hidden ? "Show" : "Hide");
  });
  for (const heading of byId("methods").tHead.rows[0].cells) {
    heading.firstElementChild.addEventListener("click", () => sortBy(heading));
  }
  for (const body of byId("methods").tBodies) {
    body.addEventListener("click", ({ target }) => choose(Number(target.closest("tr").dataset.method)));
  }
  select.addEventListener("change", () => choose(Number(select.value)));
  data.learning.forEach((figure, i) => showFigure(`learning-${i}`, figure));
  if (byId("more")) byId("more").checked = false; // a browser may remember another choice
  field.value = field.defaultValue;
  choose(method);
}
