// Shows one question at a time on docs/choose, and then what the answers lead to.
// The address keeps the answers, as #harm=twice&who=machines, so that back, reload and a shared link work.
// All texts and all links are in the page: without this script, it is a list that leads to the same places.
(() => {
  "use strict";
  const root = document.querySelector(".choose");
  if (!root) return;
  const sections = [...root.querySelectorAll("section")];
  const find = (kind, name) => sections.find((section) => section.dataset[kind] === name);

  const trail = document.createElement("nav");
  trail.setAttribute("aria-label", "Your answers");
  trail.className = "trail";
  root.before(trail);
  root.classList.add("live");

  // What the address says: the answers that exist, and where they lead.
  function walk(hash) {
    const given = new URLSearchParams(hash.replace(/^#/, ""));
    const steps = [];
    let name = root.dataset.first;
    while (given.has(name)) {
      const question = find("question", name);
      const answers = question ? [...question.querySelectorAll("[data-answer]")] : [];
      const answer = answers.find((link) => link.dataset.answer === given.get(name));
      if (!answer) break;
      // Where it leads may depend on the answers before.
      const instead = (answer.dataset.instead ?? "").split(" ").map((each) => each.split(":"));
      const elsewhere = instead.find(([id]) => steps.some((step) => step.answer.dataset.answer === id));
      steps.push({ question: name, answer });
      name = elsewhere ? elsewhere[1] : answer.dataset.go;
    }
    return { steps, name };
  }

  function address(steps) {
    return "#" + steps.map(({ question, answer }) => `${question}=${answer.dataset.answer}`).join("&");
  }

  function link(text, href) {
    const anchor = document.createElement("a");
    anchor.textContent = text;
    anchor.href = href;
    return anchor;
  }

  function show(moveFocus) {
    const hash = decodeURIComponent(location.hash);
    const target = hash.length > 1 && !hash.includes("=") ? document.getElementById(hash.slice(1)) : null;
    const { steps, name } = walk(target ? "" : hash);
    const main = target?.closest(".choose section") ?? find("question", name) ?? find("backend", name);
    const advised = target ? [] : steps.map(({ answer }) => answer.dataset.advice).filter(Boolean);
    const advice = advised.map((each) => find("adviceText", each));
    const shown = main.dataset.question ? [main] : [main, ...advice];
    for (const section of sections) section.hidden = !shown.includes(section);

    trail.replaceChildren();
    if (steps.length) {
      const list = document.createElement("ol");
      steps.forEach(({ answer }, index) => {
        const item = document.createElement("li");
        const change = link("change", address(steps.slice(0, index)));
        change.setAttribute("aria-label", `Change the answer: ${answer.dataset.short}`);
        item.append(answer.dataset.short, " ", change);
        list.append(item);
      });
      trail.append(list);
    }
    if (steps.length || target) trail.append(link("Start again", "#"));
    const heading = main.querySelector("h2");
    heading.tabIndex = -1;
    root.dataset.shown = location.hash;
    if (moveFocus && !(target && target !== heading)) {
      heading.focus({ preventScroll: true });
      trail.scrollIntoView({ block: "nearest" });
      if (heading.getBoundingClientRect().top < 60) window.scrollTo({ top: 0 });
    }
  }

  root.addEventListener("click", (event) => {
    const answer = event.target.closest("[data-answer]");
    if (!answer || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const question = answer.closest("section").dataset.question;
    const { steps } = walk(decodeURIComponent(location.hash));
    const before = steps.findIndex((step) => step.question === question);
    location.hash = address([...(before < 0 ? steps : steps.slice(0, before)), { question, answer }]);
  });
  window.addEventListener("hashchange", () => show(true));
  show(false);
})();
