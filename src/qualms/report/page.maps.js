{
  const data = JSON.parse(byId("data").textContent);
  const [high, wide] = data.size;
  const [select, field] = [byId("method"), byId("coverage")];
  const STOPS = [[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]];
  const NO_SCORE = 255;
  const methods = data.methods.map((each) => ({
    ...each,
    thresholds: unpacked(each.thresholds),
    accepted: unpacked(each.accepted),
    flagged: unpacked(each.flagged),
    right: unpacked(each.right),
    levels: each.levels.map(unpacked),
  }));

  /* Half of all pixels are darker than a sixteenth of the scale: what is rare should be seen. */
  const ramp = Array.from({ length: methods[0].thresholds.length + 1 }, (_, level) => {
    const at = (level / methods[0].thresholds.length) ** 4 * (STOPS.length - 1);
    const i = Math.min(Math.floor(at), STOPS.length - 2);
    return STOPS[i].map((low, channel) => Math.round(low + (at - i) * (STOPS[i + 1][channel] - low)));
  });

  const paint = (canvas, levels, color) => {
    Object.assign(canvas, { width: wide, height: high });
    const image = new ImageData(wide, high);
    levels.forEach((level, i) => image.data.set(level === NO_SCORE ? [0, 0, 0, 0] : color(level), 4 * i));
    canvas.getContext("2d").putImageData(image, 0, 0);
  };

  const tell = (id, share) => {
    if (!byId(id)) return;
    byId(id).textContent = percent(share);
    byId(id).dataset.value = share;
  };

  const move = () => {
    const method = methods[Number(select.value)];
    const step = Math.round((Number(field.value) / 100) * method.thresholds.length) - 1;
    const known = byId("flagged") ? "known pixels" : "pixels";
    byId("covered").textContent = percent(Number(field.value) / 100);
    byId("threshold").textContent = brief(method.thresholds[step]);
    byId("threshold").dataset.value = method.thresholds[step];
    for (const id of ["accepted", "flagged", "right"]) if (method[id]) tell(id, method[id][step]);
    const by = element("span", method.name, "by");
    const strong = (share) => element("strong", percent(share));
    const answer = ["At ", percent(method.accepted[step]), ` of the ${known} accepted by `, by];
    if (method.flagged) {
      answer.push(", ", strong(method.flagged[step]), " of the unknown pixels are flagged");
    } else if (method.right) {
      const end = " of the accepted pixels are predicted correctly";
      answer.push(", ", strong(method.right[step]), end);
    }
    byId("answer").replaceChildren(...answer, ".");
    for (const scene of document.querySelectorAll(".scene")) {
      const levels = method.levels[Number(scene.dataset.scene)];
      const scored = levels.filter((level) => level !== NO_SCORE);
      const flagged = scored.filter((level) => level > step).length;
      paint(scene.querySelector(".flags"), levels, (level) => (level > step ? [255, 112, 0, 225] : [0, 0, 0, 110]));
      scene.querySelector(".flagged-here").textContent = `${percent(flagged / scored.length)} of its pixels flagged`;
    }
  };

  const choose = (number) => {
    select.value = String(number);
    for (const name of document.querySelectorAll(".chosen")) name.textContent = methods[number].name;
    for (const row of document.querySelectorAll("#methods tbody tr")) {
      const mine = Number(row.dataset.method) === number;
      row.classList.toggle("chosen-row", mine);
      row.querySelector(".pick").setAttribute("aria-pressed", mine);
    }
    for (const scene of document.querySelectorAll(".scene")) {
      paint(scene.querySelector(".scores"), methods[number].levels[Number(scene.dataset.scene)], (level) => [...ramp[level], 255]);
    }
    move();
  };

  select.addEventListener("change", () => choose(Number(select.value)));
  field.addEventListener("input", move);
  byId("methods")?.tBodies[0].addEventListener("click", ({ target }) => choose(Number(target.closest("tr").dataset.method)));
  field.value = field.defaultValue; // a browser may remember another choice
  choose(0);
}
