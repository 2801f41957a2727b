/* Drop an image, send it to the service, show the result. Text is inserted as text, never as HTML. */
{
  const [file, drop, token] = [byId("file"), byId("drop"), byId("token")];
  const MAX_LAYERS = 12; // the number of layers shown
  const LOG_RATIO = 30; // the axis is logarithmic if the reference spans a larger factor
  let info = null; // of the model
  let newest = 0; // the number of the newest image: answers to older ones are dropped

  const percent = (share) =>
    share < 1 && share > 0.9995 ? "over 99.9\u00a0%" : `${Number((100 * share).toFixed(1))}\u00a0%`;

  const fetchJson = async (path, options = {}) => {
    const headers = token?.value ? { Authorization: `Bearer ${token.value}` } : {};
    let answer;
    try {
      answer = await fetch(path, { ...options, headers });
    } catch {
      throw new Error("the service is not responding; is it still running?");
    }
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error);
    return body;
  };

  const show = (id, text, className = "") => {
    byId(id).textContent = text;
    byId(id).className = className;
  };

  /* An axis that holds most of the reference, the threshold and this image. */
  const makeAxis = (reference, others) => {
    const quantile = (share) => reference[Math.round(share * (reference.length - 1))];
    const low = Math.min(quantile(0.01), ...others);
    const high = Math.max(quantile(0.99), ...others);
    if (low === high) {
      return { low: low - (Math.abs(low) / 2 || 0.5), high: high + (Math.abs(high) / 2 || 0.5), log: false };
    }
    if (quantile(0.05) > 0 && low > 0 && high > LOG_RATIO * quantile(0.05)) return { low, high: high * 1.1, log: true };
    const margin = 0.02 * (high - low);
    return { low: low - margin, high: high + margin, log: false };
  };

  const draw = (score) => {
    const { reference, threshold } = info;
    byId("drawing").hidden = !reference.length;
    if (!reference.length) return;
    const axis = makeAxis(reference, threshold === null ? [score] : [score, threshold]);
    const here = 100 * place(axis, score);
    const limit = threshold === null ? 0 : 100 * place(axis, threshold);
    byId("reference").style.setProperty("--at", `${limit}%`);
    byId("histogram").replaceChildren(ridge(reference, axis, 0));
    byId("here").style.left = `${here}%`;
    byId("here").classList.toggle("left", here > 60);
    byId("limit").style.left = `${limit}%`;
    byId("limit").hidden = threshold === null;
    byId("axis").replaceChildren(...labeled(axis, "left"));
  };

  const describeDecision = (decision, name) => {
    if (decision === "accepted") return `Accepted: ${name}`;
    if (decision === "abstain") return `Abstain. The network would predict ${name}`;
    return name;
  };

  const describeScore = (score, percentile, isDecided) => {
    const parts = [`The score is ${brief(score)}`];
    if (percentile !== null) parts.push(`${percent(percentile / 100)} of the reference scores are lower`);
    if (isDecided && info.threshold === null) parts.push("no score is accepted");
    if (isDecided && info.threshold !== null) parts.push(`scores up to ${brief(info.threshold)} are accepted`);
    return `${parts.join("; ")}.`;
  };

  const showDecision = (decision) => {
    const isAccepted = decision === "accepted";
    const tile = byId("decision-tile");
    tile.hidden = decision === null;
    tile.style.setProperty("--color", isAccepted ? "var(--accepted)" : "var(--flagged)");
    show("decision", isAccepted ? "accepted" : "abstain", isAccepted ? "accepted-text" : "abstain-text");
  };

  const showResult = (result) => {
    const { decision, percentile } = result;
    const name = result.class_name ?? `class ${result.prediction}`;
    const confidence = percent(result.confidence);
    const score = result.scores[info.methods[0]];
    show("prediction", name);
    show("confidence", confidence);
    showDecision(decision);
    show("percentile", percentile === null ? "" : percent(percentile / 100));
    byId("percentile").parentElement.hidden = percentile === null;
    byId("drawing-summary").textContent = describeScore(score, percentile, decision !== null);
    byId("answer").textContent = `${describeDecision(decision, name)}, at ${confidence} confidence.`;
    draw(score);
    byId("scores").tBodies[0].replaceChildren(
      ...Object.entries(result.scores).map(([method, value]) => {
        const row = element("tr");
        const head = element("th", method);
        head.scope = "row";
        row.append(head, element("td", brief(value)));
        return row;
      }),
    );
  };

  const showLayers = (layers) => {
    byId("layers").hidden = !layers;
    if (!layers) return;
    const most = layers.toSorted((a, b) => b.share - a.share).slice(0, MAX_LAYERS);
    const shown = layers.filter((layer) => most.includes(layer));
    const rest = layers.length - shown.length;
    byId("layers-summary").textContent =
      `The largest share, without smoothing, comes from ${most[0].name} (${percent(most[0].share)}).` +
      (rest ? ` Not shown: ${rest} with smaller shares.` : "");
    byId("bars").replaceChildren(
      ...shown.map(({ name, share }) => {
        const [row, track, bar] = [element("div", undefined, "share"), element("div", undefined, "track"), element("i")];
        const who = element("span", name, "who");
        who.title = name;
        bar.style.width = `${(100 * share) / most[0].share}%`;
        bar.style.background = "var(--known)";
        track.append(bar);
        row.append(who, track, element("span", percent(share), "much"));
        return row;
      }),
    );
  };

  const showError = (error) => {
    byId("problem").textContent = error.message[0].toUpperCase() + error.message.slice(1);
    byId("problem").hidden = false;
  };

  const scoreImage = async (image) => {
    const own = ++newest;
    byId("problem").hidden = true;
    byId("answer").textContent = `Scoring ${image.name} …`;
    const form = new FormData();
    form.append("images", image);
    try {
      info ??= await fetchJson("/v1/model");
      byId("weights").textContent = `Weights ${info.model_hash}. `;
      const answer = await fetchJson("/v1/score?layers=true", { method: "POST", body: form });
      if (own !== newest) return;
      const preview = byId("preview");
      URL.revokeObjectURL(preview.src);
      preview.hidden = false;
      preview.alt = image.name;
      preview.src = URL.createObjectURL(image);
      byId("found").hidden = false;
      showResult(answer.results[0]);
      showLayers(answer.results[0].layers);
    } catch (error) {
      if (own !== newest) return;
      byId("answer").textContent = `${image.name} was not scored.`;
      byId("found").hidden = true;
      showError(error);
    }
  };

  /* While the network is warming up, show the progress once a second. */
  const POLL_INTERVAL = 1000; // milliseconds
  const NO_ANSWER = "The service is not responding; is it still running?";
  const warmingText = ({ status, step, step_number, steps, seconds }) =>
    status === "failed"
      ? "The network could not be loaded; see the service's log."
      : `Warming up: ${step} (${step_number} of ${steps}, ${Math.round(seconds)} s)`;
  const waitUntilReady = async () => {
    const warming = byId("warming");
    for (;;) {
      try {
        const progress = await (await fetch("/readyz")).json();
        if (progress.status === "ready") break;
        warming.textContent = warmingText(progress);
      } catch {
        warming.textContent = NO_ANSWER;
      }
      await new Promise((done) => setTimeout(done, POLL_INTERVAL));
    }
    warming.remove();
    byId("answer").textContent = byId("answer").dataset.invitation;
    file.disabled = false;
  };
  if (byId("warming")) waitUntilReady();

  byId("preview").addEventListener("load", ({ target }) => target.classList.toggle("large", target.naturalWidth > 192));
  byId("preview").addEventListener("error", ({ target }) => (target.hidden = true)); // few browsers show TIFF
  file.addEventListener("change", () => file.files[0] && scoreImage(file.files[0]));
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind.startsWith("drage") || kind === "dragover");
      if (kind === "drop" && !file.disabled && event.dataTransfer.files[0]) scoreImage(event.dataTransfer.files[0]);
    });
  }
}
