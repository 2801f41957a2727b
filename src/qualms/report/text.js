/* Texts whose tokens are shaded by their scores: the method, the threshold, the order of the texts, the worst spans. */
const STEPS = 10; // of the shades
const PARTS = 60; // of a strip
const CONTEXT = 40; // characters beside the worst span, where it is quoted

const texts = (() => {
  const data = JSON.parse(byId("data").textContent);
  const [select, slider] = [byId("method"), byId("share")];
  let method = 0;
  let threshold = 0;

  const documents = data.documents.map((found, number) => ({
    ...found,
    ...Object.fromEntries(["starts", "ends", "counts", "logs", "codes", "probs"].map((key) => [key, unpacked(found[key])])),
    scores: found.scores.map(unpacked),
    worstScores: unpacked(found.worstScores),
    levels: [], // the shades by method, once they are known
    spans: null, // the tokens' elements, once the text comes near
    at: 0, // the token that Tab leads to
    article: byId(`document-${number}`),
    row: byId(`row-${number}`),
    body: byId(`document-${number}`).querySelector(".text"),
  }));
  const owner = new Map(documents.map((each) => [each.article, each]));

  /* All scores of a method in rising order; those of the last tokens, which are not numbers, left out. */
  const orders = [];
  const sorted = () => {
    orders[method] ??= Float64Array.from(
      documents.flatMap((each) => Array.from(each.scores[method]).filter((x) => !Number.isNaN(x))),
    ).sort();
    return orders[method];
  };

  const level = (rising, x) => Math.floor((STEPS * below(rising, x)) / rising.length);
  const levelsOf = (each) => (each.levels[method] ??= Uint8Array.from(each.scores[method], (x) => (x === x ? level(sorted(), x) : 0)));
  const marks = (each, i) => each.scores[method][i] > threshold;
  const classOf = (each, i) => `t s${levelsOf(each)[i]}${marks(each, i) ? " m" : ""}`;

  const shade = (each) =>
    each.spans?.forEach((span, i) => {
      const wanted = classOf(each, i);
      if (span.className !== wanted) span.className = wanted;
    });

  const tokenText = (each, i) => each.text.slice(each.starts[i], each.ends[i]);

  /* Tokens become elements only where a reader may see them; until then the text stands there as it is. */
  const build = (each) => {
    if (each.spans) return;
    const parts = [];
    let reached = 0;
    each.spans = Array.from(each.starts, (start, i) => {
      const span = element("span", tokenText(each, i), classOf(each, i));
      span.token = i;
      if (/^[\r\n]+$/.test(span.textContent)) span.dataset.break = "";
      if (start > reached) parts.push(each.text.slice(reached, start));
      parts.push(span);
      reached = each.ends[i];
      return span;
    });
    each.body.replaceChildren(...parts, each.text.slice(reached));
    outline(each);
  };

  const outline = (each) => {
    const worst = each.worst[method];
    const old = each.body.querySelector(".worst");
    old?.replaceWith(...old.childNodes);
    if (!each.spans?.length) return;
    if (worst) {
      const [range, mark] = [document.createRange(), element("mark", undefined, "worst")];
      range.setStartBefore(each.spans[worst.start]);
      range.setEndAfter(each.spans[worst.end - 1]);
      mark.append(range.extractContents());
      range.insertNode(mark);
    }
    reach(each, worst?.start ?? 0);
  };

  /* One token of a text is on the way of the Tab key. */
  const reach = (each, i) => {
    each.spans[each.at].removeAttribute("tabindex");
    each.at = i;
    each.spans[i].tabIndex = 0;
  };

  const goTo = (each, i) => {
    build(each);
    reach(each, i);
    each.spans[i].scrollIntoView({ block: "center", behavior: "instant" });
    each.spans[i].focus({ preventScroll: true });
  };

  /* How the score goes along a text: its mean in each part, ranked among the parts of all texts. */
  const meansOf = (each) => {
    const [values, parts] = [each.scores[method], Math.min(PARTS, each.scores[method].length)];
    return Array.from({ length: parts }, (_, k) => {
      const part = values.slice(Math.floor((k * values.length) / parts), Math.floor(((k + 1) * values.length) / parts));
      const there = part.filter((x) => x === x);
      return there.reduce((a, b) => a + b, 0) / there.length;
    });
  };

  const drawStrips = () => {
    const means = documents.map(meansOf);
    const rising = Float64Array.from(means.flat().filter((x) => x === x)).sort();
    documents.forEach((each, k) => {
      const strip = () =>
        canvas(means[k].length || 1, 1, ...means[k].map((x, i) => drawn("rect", { x: i, width: 1.02, height: 1, class: `s${x === x ? level(rising, x) : 0}` })));
      each.article.querySelector(".strip").replaceChildren(strip());
      each.row.querySelector(".strip").replaceChildren(strip());
    });
  };

  /* Words and numbers. */
  const grouped = (count) => count.toLocaleString("en");
  const counted = (count, what) => `${grouped(count)} ${what}${count === 1 ? "" : "s"}`;
  const worstOf = (each) => each.worstScores[method];

  const answer = () => {
    const worst = documents.filter((each) => each.worst[method]).toSorted((a, b) => worstOf(b) - worstOf(a))[0];
    const by = element("span", data.methods[method], "by");
    if (!worst) return ["No token has a score by ", by, "."];
    const { start, end } = worst.worst[method];
    const plain = (from, to) => worst.text.slice(from, to).replace(/\s+/g, " ");
    const [before, after] = [plain(0, worst.starts[start]), plain(worst.ends[end - 1])];
    const [left, right] = [before.slice(-CONTEXT), after.slice(0, CONTEXT)]; // cut at a space, unless that is all there is
    const quote = element("span", "“", "quote");
    quote.append(
      left === before ? left.trimStart() : `… ${left.slice(left.indexOf(" ") + 1)}`,
      element("strong", plain(worst.starts[start], worst.ends[end - 1])),
      right === after ? right.trimEnd() : `${right.slice(0, right.lastIndexOf(" ") + 1)}…`,
      "”",
    );
    return ["By ", by, ", the model is least certain in ", element("strong", worst.name), ": ", quote];
  };

  const updateMarks = () => {
    const rising = sorted();
    const share = Number(slider.value) / 100;
    threshold = rising.length ? thresholdFor(rising, 1 - share) : NaN;
    const count = rising.length - upTo(rising, threshold);
    const limit = rising.length ? brief(threshold) : "–";
    documents.forEach(shade);
    byId("marked").replaceChildren(grouped(count), element("small", `of ${grouped(rising.length)}`));
    byId("threshold").textContent = limit;
    const tokens = counted(count, "token");
    byId("marked-share").textContent = `${percent(share)}: ${tokens} with a score above ${limit}`;
    slider.setAttribute("aria-valuetext", byId("marked-share").textContent);
    for (const each of documents) {
      const own = each.scores[method].reduce((sum, x) => sum + (x > threshold), 0);
      const whole = `gradient of the whole text: ${brief(each.sequence ?? 0)} per token`;
      const gradient = each.sequence === null ? [] : [whole];
      const worst = each.worst[method] ? `worst span ${brief(worstOf(each))}` : "no scores";
      const length = each.starts.length;
      const marked = `${grouped(own)} marked (${percent(own / (length || 1))})`;
      const numbers = [counted(length, "token"), worst, marked, ...gradient];
      each.article.querySelector(".numbers").textContent = numbers.join(" · ");
    }
  };

  const sort = () => {
    const score = (each) => (each.worst[method] ? worstOf(each) : -Infinity);
    const byName = (a, b) => a.name.localeCompare(b.name, "en", { numeric: true });
    const order = documents.toSorted(byId("by-name").checked ? byName : (a, b) => (score(a) === score(b) ? 0 : score(b) - score(a)));
    byId("list").append(...order.map((each) => each.row));
    byId("documents").append(...order.map((each) => each.article));
  };

  const choose = (number) => {
    method = number;
    const rising = sorted();
    for (const each of documents) {
      each.row.querySelector(".worst-score").textContent = each.worst[method] ? brief(worstOf(each)) : "–";
      each.article.querySelector(".jump").hidden = !each.worst[method];
      outline(each);
    }
    byId("answer").replaceChildren(...answer());
    byId("count").textContent = grouped(rising.length);
    byId("mean").textContent = rising.length ? brief(rising.reduce((a, b) => a + b, 0) / rising.length) : "–";
    drawStrips();
    updateMarks();
    sort();
  };

  for (const each of documents) {
    each.body.textContent = each.text;
    each.row.querySelector("a").append(element("span", undefined, "strip"));
    each.article.querySelector(".jump").addEventListener("click", () => goTo(each, each.worst[method].start));
    each.article.querySelector(".strip").addEventListener("click", (event) => {
      const box = event.currentTarget.getBoundingClientRect();
      const share = Math.min(0.999999, Math.max(0, (event.clientX - box.left) / box.width));
      if (each.starts.length) goTo(each, Math.floor(share * each.starts.length));
    });
  }
  const near = new IntersectionObserver(
    (seen) => seen.forEach(({ isIntersecting, target }) => isIntersecting && build(owner.get(target))),
    { rootMargin: "100% 0%" },
  );
  select.addEventListener("change", () => choose(Number(select.value)));
  slider.addEventListener("input", updateMarks);
  for (const id of ["by-worst", "by-name"]) byId(id).addEventListener("change", sort);
  select.value = "0"; // a browser may remember another choice
  slider.value = slider.defaultValue;
  byId("by-worst").checked = true;
  choose(0);
  documents.forEach((each) => near.observe(each.article));

  return {
    data,
    goTo,
    marks,
    reach,
    tokenText,
    ofSpan: (span) => owner.get(span.closest("article")),
    scoreOf: (each, i) => each.scores[method][i],
    rankOf: (x) => below(sorted(), x) / sorted().length,
  };
})();
